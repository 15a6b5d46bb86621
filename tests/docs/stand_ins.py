"""All that differs between a block as a page shows it and as the tests run it. Everything else runs as written.

A block is named by its page and its first line without a remark. ``test_blocks.py`` fails where a name here is that of
no block or command, so that nothing stays listed that is gone.
"""

from __future__ import annotations

from textwrap import dedent

Key = tuple[str, str]

# Text that is replaced in Python blocks and in commands: paths, and sizes that would take hours or gigabytes.
REPLACED: dict[str, dict[str, str]] = {
    "README.md": {
        "/local_nvme": "nvme",
        "4GiB": "64MiB",
        "max_steps=1000": "max_steps=2",
        "bf16=True": "bf16=True, use_cpu=True",
    },
    "checkpoints.md": {"% 500": "% 2", "runs/mine": "runs/7", "global_step3000": "global_step4"},
    "memory.md": {'"64MiB"': '"8KiB"'},
    "doctor.md": {"/mnt/nvme0 /mnt/nvme1": "nvme", "/var/tmp": "nvme"},
    "accelerate.md": {"/local_nvme": "nvme"},
    "lightning.md": {"/local_nvme": "nvme"},
    "planning.md": {"/mnt/nvme": "nvme"},
    "sizing.md": {"/nvme0 /nvme1": "nvme"},
    "transformers.md": {
        "/local_nvme": "nvme",
        "4GiB": "64MiB",
        "Qwen/": "",
        '"*.py"))[:20]': '"bisect.py"))',
        "max_steps=20": "max_steps=2",
        "save_steps=10": "save_steps=2",
        "eval_steps=10": "eval_steps=2",
        "bf16=True": "bf16=True, use_cpu=True",
    },
    "tierbench.md": {"/mnt/nvme0": "nvme", "/local_nvme": "nvme", "DIR": "nvme"},
}

MODEL = """\
from pathlib import Path
import torch
import tiering
from tiering.demo.model import GPT

def build(): return GPT(width=32, layers=2, heads=2, sequence=16)

def batch(size=2):
    tokens = torch.randint(0, 256, (size, 17))
    return tokens[:, :-1], tokens[:, 1:]

nvme = {"device": "nvme", "nvme_path": "nvme"}
ds_config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    "tiering": {"host_budget": "64MiB", "cache_in_host": False},
}
"""
ENGINE = MODEL + "engine, *_ = tiering.initialize(model=build(), config=ds_config)\n"
FILES = """\
from safetensors.torch import save_file
torch.manual_seed(0)
Path("Llama-3.2-3B").mkdir(exist_ok=True)
save_file(build().state_dict(), "Llama-3.2-3B/model.safetensors")
"""
LLAMA = """\
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
llama = LlamaConfig(vocab_size=256, tie_word_embeddings=False, **sizes)
"""
LANGUAGE_MODEL = (
    MODEL
    + LLAMA
    + """\
class MyModel(LlamaForCausalLM):
    def __init__(self): super().__init__(llama)
    def forward(self, inputs, targets): return super().forward(inputs, labels=targets).loss
"""
)

# Files of the reader's that a page names, in small.
CONFIG = """{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
"num_attention_heads": 2, "vocab_size": 256}"""
DS_CONFIG = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3},
"optimizer": {"type": "AdamW"}}"""
WRITTEN: dict[str, dict[str, str]] = {
    "README.md": {
        "config.json": CONFIG,
        "ds_config.json": DS_CONFIG,
        "zero3_nvme.json": '{"zero_optimization": {"stage": 3}}',
    },
    "sizing.md": {"config.json": CONFIG},
    "migrate-from-deepspeed.md": {"train.py": "import deepspeed\n"},
}

# Python that runs before a block: what the page takes as given, in small.
TRANSFORMERS = (
    LLAMA
    + """\
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

symbols = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytes_of = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_of.decoder = decoders.ByteLevel()
small = LlamaConfig(vocab_size=len(symbols), bos_token_id=1, eos_token_id=1, pad_token_id=0, **sizes)
for directory in ("Qwen3-0.6B", "Llama-3.2-3B"):
    LlamaForCausalLM(small).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=bytes_of, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(directory)
"""
)

GIVEN: dict[Key, str] = {
    ("transformers.md", "# finetune.py"): TRANSFORMERS,
    ("transformers.md", "import tiering"): dedent("""\
        from tiering.integrations.transformers import TieringTrainer

        args.save_strategy = "no"
        data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(64)]
        """),
    ("memory.md", 'tiering.tile(model, "64MiB", modules=["lm_head", "embed_tokens"])'): (
        MODEL + LLAMA + "model = LlamaForCausalLM(llama)\n"
    ),
    ("memory.md", "class WithLoss(nn.Module):"): dedent("""\
        import torch
        import tiering
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        """),
    ("README.md", "import tiering"): LANGUAGE_MODEL + "batches = [batch() for _ in range(8)]",
    ("README.md", "from transformers import TrainingArguments"): dedent("""\
        engine.close()
        model = LlamaForCausalLM(llama)
        data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(64)]
        """),
    ("engine.md", "with torch.no_grad(), engine.adapters_disabled():"): LLAMA
    + dedent("""\
        import warnings

        import peft

        # Transformers has renamed what peft calls.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated", FutureWarning)
        of_page = engine, batch
        adapters = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(LlamaForCausalLM(llama), adapters)
        engine, *_ = tiering.initialize(model=adapted, config=ds_config)
        batch = {"input_ids": torch.randint(0, 256, (2, 16))}
        """),
    ("README.md", "from peft import LoraConfig, get_peft_model"): dedent("""\
        import warnings

        # Transformers has renamed what peft calls.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated", FutureWarning)
        LlamaForCausalLM(llama).save_pretrained("Llama-3.3-70B")
        """),
    ("README.md", "from optim_cpu import AdamW"): "model = build()",
    ("building.md", "torch.manual_seed(0)"): MODEL + LLAMA + "config = llama\n",
    ("building.md", 'with torch.device("meta"):'): "engine.close()\nModel = build",
    (
        "building.md",
        'engine, *_ = tiering.initialize(model=model, config=ds_config, weights="Llama-3.2-3B/")',
    ): FILES,
    ("checkpoints.md", 'engine.load_checkpoint("runs/7")'): LANGUAGE_MODEL
    + dedent("""\
        ds_config["gradient_accumulation_steps"] = 2
        Path("Llama-3.2-3B").mkdir()
        LlamaForCausalLM(llama).save_pretrained("Llama-3.2-3B")
        engine, *_ = tiering.initialize(model=MyModel(), config=ds_config)
        loader = [batch() for _ in range(8)]
        """),
    ("distributed.md", "import os"): MODEL
    + dedent("""\
        import json
        Path("ds_config.json").write_text(json.dumps(ds_config))

        model = build()
        data = torch.utils.data.TensorDataset(*batch(8))
        """),
    ("distributed.md", "# train_sequences.py"): LLAMA
    + dedent("""\
        engine.close()
        LlamaForCausalLM(llama).save_pretrained("Llama-3.2-3B")
        Path("my_data.py").write_text(
            "import torch\\ntokens = torch.arange(64).view(4, 16)\\n"
            "documents = [{'input_ids': row, 'labels': row} for row in tokens]\\n"
        )
        """),
    ("distributed.md", "weights = engine.state_dict()"): dedent("""\
        os.environ["RANK"] = "0"
        engine, *_ = tiering.initialize(model=build(), config=ds_config)
        """),
    ("engine.md", "with tiering.gathered(model.head.weight, modify=True) as weight, torch.no_grad():"): ENGINE
    + "model = engine.module\nloss = 0\nengine.backward(engine(*batch()))\n",
    ("engine.md", "from peft import LoraConfig, get_peft_model"): dedent("""\
        engine.close()
        import warnings
        from transformers import AutoModelForCausalLM, LlamaConfig
        # peft 0.21 reads a property that transformers has renamed.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated", FutureWarning)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=96, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained("Llama-3.1-8B")
        """),
    ("engine.md", "from contextlib import nullcontext"): dedent("""\
        engine.step()
        engine.close()
        model, data = build(), [batch() for _ in range(8)]
        """),
    ("engine.md", "for number, (x, y) in enumerate(data):"): "data = [batch() for _ in range(13)]",
    (
        "loading.md",
        'engine, *_ = tiering.initialize(model=model, config=ds_config, weights="Llama-3.2-3B/")',
    ): MODEL + FILES + "model = build()\n",
    ("planning.md", "from pathlib import Path"): MODEL
    + "plan = tiering.plan_for(model=build(), config=ds_config).plan\n",
}

# Python that runs after a block, with its names: what the page says has happened.
HOLDS: dict[Key, str] = {
    ("README.md", "from transformers import TrainingArguments"): (
        "assert Path('trained/config.json').is_file()\nengine = trainer.engine"
    ),
    ("transformers.md", "import tiering"): "trainer.save_model()\nengine = trainer.engine",
    ("transformers.md", "from transformers import Trainer"): dedent("""\
        from transformers import TrainingArguments

        options = {"max_steps": 2, "use_cpu": True, "save_strategy": "no", "report_to": "none"}
        trainer = ChunkedLossTrainer(
            LlamaForCausalLM(small),
            TrainingArguments("chunked", prediction_loss_only=True, **options),
            train_dataset=[{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(64)],
            tiering_config={"zero_optimization": {"stage": 3}},
        )
        assert trainer.train().training_loss > 0
        assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0
        trainer.engine.close()
        """),
    ("memory.md", 'tiering.tile(model, "64MiB", modules=["lm_head", "embed_tokens"])'): (
        "assert [len(each.tiles) for each in (model.lm_head, model.model.embed_tokens)] == [4, 4]\n"
    ),
    ("memory.md", "class WithLoss(nn.Module):"): dedent("""\
        tokens = torch.randint(0, 50, (2, 9))
        losses = [WithLoss(model, rows)(tokens, tokens) for model in (Model(),) for rows in (3, 100)]
        assert losses[0].isclose(losses[1]) and losses[0] > 0
        """),
    ("README.md", "import tiering"): "assert Path('runs/7/latest').read_text() == 'global_step8'",
    ("checkpoints.md", 'engine.load_checkpoint("runs/7")'): "assert Path('runs/7/global_step4').is_dir()",
    (
        "engine.md",
        "with torch.no_grad(), engine.adapters_disabled():",
    ): "engine.close()\nengine, batch = of_page",
    ("engine.md", "from peft import LoraConfig, get_peft_model"): (
        "tokens = torch.randint(96, (2, 8))\n"
        "engine.backward(engine(input_ids=tokens, labels=tokens).loss)\n"
        "engine.step()\n"
        "assert engine.state_dict()['base_model.model.model.layers.0.mlp.up_proj.base_layer.weight'].shape == (4096,)"
    ),
    ("engine.md", "from contextlib import nullcontext"): (
        "assert (engine.global_steps, scheduler.last_epoch) == (2, 2)"
    ),
    ("engine.md", "for number, (x, y) in enumerate(data):"): "assert Path('step.json').stat().st_size > 1000",
    ("migrate-from-deepspeed.md", "import argparse"): (
        "assert (engine.global_steps, engine.settings.precision) == (4, 'bf16')"
    ),
}

# Commands that run in another form: with less to do, on a free port, for some seconds, from this source tree.
BRIEF = "--size 64M --runtime 0.3"
RUN_AS: dict[Key, str] = {
    ("distributed.md", "torchrun --standalone --nproc-per-node=2 train_sequences.py"): (
        "python -m torch.distributed.run --standalone --nproc-per-node=2 train_sequences.py"
    ),
    ("transformers.md", "torchrun --nproc-per-node 2 finetune.py"): (
        "python -m torch.distributed.run --nproc-per-node 2 finetune.py"
    ),
    ("examples.md", "python examples/mnist/train.py"): 'python "$ROOT/examples/mnist/train.py" --steps 20',
    ("examples.md", "torchrun --standalone --nproc-per-node=2 examples/mnist/train.py --steps 100"): (
        'python -m torch.distributed.run --standalone --nproc-per-node=2 "$ROOT/examples/mnist/train.py" --steps 10'
    ),
    # Until it serves.
    ("sidecar.md", "tierd"): (
        "tierd --port 0 > served & until grep -q http:// served; do sleep 0.1; done; cat served; kill $!; wait $!"
    ),
    ("tierbench.md", "tierbench /mnt/nvme0"): f"tierbench nvme {BRIEF}",
    ("tierbench.md", "tierbench /local_nvme"): f"tierbench nvme {BRIEF} --rw write",
    ("tierbench.md", "tierbench tune DIR"): "tierbench tune nvme --runtime 4 --size 64M",
    ("tierbench.md", "tierbench compare A B"): (
        f"tierbench nvme {BRIEF} --json > A; tierbench nvme {BRIEF} --json > B; tierbench compare A B"
    ),
    (
        "tierbench.md",
        "tierbench /mnt/nvme0 --json > before.json",
    ): f"tierbench nvme {BRIEF} --json > before.json",
    (
        "tierbench.md",
        "tierbench /mnt/nvme0 --json > after.json",
    ): f"tierbench nvme {BRIEF} --json > after.json",
    ("tierbench.md", "tierbench compare before.json after.json --fail-under 0.9"): (
        "tierbench compare before.json after.json --fail-under 0.001"
    ),
    ("tierbench.md", "tierbench compare --fio DIR --pairs 10 --rw read,write,rw --bs 1M --iodepth 16"): (
        f"tierbench compare --fio nvme --pairs 2 --rw read,write,rw --bs 1M --iodepth 16 {BRIEF}"
    ),
    (
        "tierbench.md",
        "tierbench compare --fio /local_nvme --pairs 12",
    ): f"tierbench compare --fio nvme --pairs 2 {BRIEF}",
    ("README.md", "tierbench /local_nvme"): f"tierbench nvme {BRIEF}",
}

# Commands that end with another exit code than 0.
EXIT_CODES: dict[Key, int] = {
    ("migrate-from-deepspeed.md", "tiering check old.json"): 1,
}

# Commands whose output the page shows to the letter. Of others it shows the figures of one machine and time.
PRINTED: set[Key] = {
    ("migrate-from-deepspeed.md", "tiering check ds_config.json --ranks 2"),
    ("migrate-from-deepspeed.md", "tiering migrate train.py"),
    ("migrate-from-deepspeed.md", "tiering check old.json"),
}

# Pages whose Python blocks run in a process of their own: Lightning sets variables and a process group, and warns.
OWN_PROCESS: set[str] = {"accelerate.md", "deepspeed-programs.md", "lightning.md"}

# Blocks and commands that take seconds: they run in `make test-all` alone.
SLOW: set[Key] = {
    ("distributed.md", "torchrun --standalone --nproc-per-node=2 train_sequences.py"),
    ("transformers.md", "torchrun --nproc-per-node 2 finetune.py"),
    ("tierbench.md", "tierbench /mnt/nvme0 --json > before.json"),
    ("tierbench.md", "tierbench /mnt/nvme0 --json > after.json"),
    ("tierbench.md", "tierbench compare before.json after.json --fail-under 0.9"),
    ("tierbench.md", "tierbench compare A B"),
    ("README.md", "tiering plan --model config.json --config ds_config.json --measure /local_nvme"),
    ("README.md", "tierbench /local_nvme"),
    ("examples.md", "torchrun --standalone --nproc-per-node=2 examples/mnist/train.py --steps 100"),
    ("planning.md", "from pathlib import Path"),
    ("planning.md", "tierbench tiers /mnt/nvme --device cpu"),
    ("sizing.md", "tiering plan --model config.json --measure /nvme0 /nvme1"),
    ("tierbench.md", "tierbench /mnt/nvme0"),
    ("tierbench.md", "tierbench /local_nvme"),
    ("tierbench.md", "tierbench tune DIR"),
    ("tierbench.md", "tierbench profile DIR --params 7B"),
    ("tierbench.md", "tierbench profile /local_nvme --params 7B"),
    ("tierbench.md", "tierbench tiers DIR"),
    ("tierbench.md", "tierbench compare --fio DIR --pairs 10 --rw read,write,rw --bs 1M --iodepth 16"),
    ("tierbench.md", "tierbench compare --fio /local_nvme --pairs 12"),
}

# What cannot run in a test, and why.
RANKS = "starts eight GPUs or several nodes; tests/e2e/test_examples.py starts torchrun with two ranks"
NODES = (
    "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=run1"
    " train.py"
)
NOT_RUN: dict[Key, str] = {
    (
        "accelerate.md",
        "pip install 'tiering[accelerate]'",
    ): "installs packages; tests/test_wheel.py installs a wheel",
    (
        "accelerate.md",
        "torchrun --nproc-per-node 2 train.py",
    ): "a pattern: train.py is the reader's own script; tests/tiering/integrations starts ranks",
    (
        "accelerate.md",
        "python -m tiering.integrations.deepspeed accelerate launch --config_file launch.yaml train.py",
    ): "starts a launcher; tests/tiering/integrations/test_accelerate.py runs it with the file of the page",
    (
        "deepspeed-programs.md",
        "python -m tiering.integrations.deepspeed train.py --deepspeed ds_config.json",
    ): "a pattern: train.py is the reader's own script; tests/tiering/integrations has programs of its own",
    (
        "transformers.md",
        "pip install 'tiering[hf]'",
    ): "installs packages; tests/test_wheel.py installs a wheel",
    (
        "transformers.md",
        "from peft import LoraConfig",
    ): "needs bitsandbytes; tests/tiering/integrations/test_quantised.py trains in this way",
    (
        "axolotl.md",
        "from llamafactory.train.sft import workflow",
    ): "needs LLaMA-Factory, which pins older packages",
    ("axolotl.md", "import torch"): "needs torchtune; it was run with the version that the page names",
    (
        "lightning.md",
        "pip install 'tiering[lightning]'",
    ): "installs packages; tests/test_wheel.py installs a wheel",
    ("README.md", "make demo"): "installs an environment; tests/e2e/test_demo.py runs the demo, in small",
    (
        "examples.md",
        "tiering demo --dir PATH",
    ): "trains for minutes; tests/e2e/test_demo.py runs each option, in small",
    ("distributed.md", "torchrun --standalone --nproc-per-node=8 train.py"): RANKS,
    ("distributed.md", NODES): RANKS,
    ("distributed.md", "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96"): (
        "needs SLURM; tests/e2e/test_examples.py runs the script with stand-ins for srun and scontrol"
    ),
    ("gpu.md", "make gpu-carry"): "fetches from a network, and the second line needs a GPU",
    (
        "logging.md",
        "TIERING_LOG=info torchrun --standalone train.py",
    ): "a pattern: train.py is the reader's own script",
    ("sidecar.md", "U=http://127.0.0.1:8471"): (
        "needs a training that lasts; tests/service/test_docs_sidecar.py runs these commands beside one"
    ),
    ("sidecar.md", "systemctl --user enable --now tierd"): (
        "needs systemd; tests/service/test_docs_sidecar.py verifies the units"
    ),
    (
        "sidecar.md",
        'kubectl create secret generic tierd-token --from-literal=token="$(openssl rand -hex 32)"',
    ): "needs a cluster; tests/service/test_docs_sidecar.py verifies the files",
    (
        "sidecar.md",
        "kubectl apply -k examples/sidecar/kubernetes",
    ): "needs a cluster; tests/service/test_docs_sidecar.py verifies the files",
    ("sidecar.md", "tierd stacks RUN"): "needs a run that trains; tests/service/test_cli.py has two ranks",
    (
        "sidecar.md",
        "tierd stacks gpt-19m",
    ): "needs a run that trains; tests/service/test_cli.py has two ranks",
    **{
        ("sidecar.md", command): "needs other nodes; tests/service/test_nodes.py starts two sidecars"
        for command in (
            "tierd --of gpu1,gpu2:8471 --of-token-file FILE",
            "tierd --once --of gpu1,gpu2 --of-token-file FILE",
            "tierd --of-file /etc/tierd/nodes",
        )
    },
    **{
        ("sidecar.md", command): "needs a collector; tests/service/test_otlp.py has one"
        for command in (
            "tierd --otlp http://collector:4318",
            "tierd --otlp http://collector:4318 --otlp-steps",
        )
    },
    ("sidecar.md", "tierd top"): "needs a terminal; tests/service/test_terminal.py watches it in one",
    (
        "sidecar.md",
        "journalctl -u tierd -o cat",
    ): "needs systemd; tests/service/test_tierd.py reads the same lines",
    (
        "sidecar.md",
        "docker run --rm --user 1000:1000 -v state:/state -e TIERING_RUN_DIR=/state/run TRAINING_IMAGE python train.py",
    ): "needs an image with the reader's training",
    (
        "sidecar.md",
        "umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > ~/.tierd-token",
    ): ("asks another node; tests/service/test_tierd.py has tokens and addresses"),
    (
        "sidecar.md",
        "python bench/bench_sidecar.py DIR",
    ): "takes minutes; tests/bench/test_sidecar.py runs its parts",
}
