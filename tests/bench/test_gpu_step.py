"""What bench_gpu_step.py trains, which sides meet, what it concludes from rounds, and what gpu_copy.py measures."""

from __future__ import annotations

import dataclasses
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_carry
import gpu_copy
import pytest
import torch
from frame.report import Report
from frame.side import BENCH, Place, SideError
from gpu_step import cases, plain, serve, sides, tables
from gpu_step.cases import Setting
from gpu_step.link import Link
from gpu_step.llama import Llama
from gpu_step.meter import Meter
from gpu_step.ours import Ours, configuration
from gpu_step.run import Measured, Run
from gpu_step.shape import TINY, Shape, of_size
from gpu_step.side import GOODBYE, Round, Side, Spec
from gpu_step.sides import CONTEXT, PROCESS, SPARE, Sides
from gpu_step.waves import Memory, packed
from gpu_step.work import Work
from torch.utils.flop_counter import FlopCounterMode

from tiering.placement.workload import Tier
from zero3.device import tiers
from zero3.device.slab import DeviceSlab
from zero3.setup.plan_for import plan_for

REPOSITORY = BENCH.parent
GIB = 1 << 30
GB = 10**9
MIB = 1 << 20
H200 = Memory(int(0.9 * 140 * GIB), int(0.85 * 120 * GIB))
SMALL_CARD = Memory(int(0.9 * 24 * GIB), int(0.85 * 64 * GIB))
CPU = Work(TINY, sequence=32, card=None)
PINNED = Link(
    "a card",
    140 * GIB,
    "torch",
    alone={"h2d": 55e9, "d2h": 54e9},
    both={"h2d": 50e9, "d2h": 40e9},
    engine={"h2d": 48e9, "d2h": 35e9},
)


def a_round(seconds: float = 4.0, **changes: Any) -> Round:
    defaults = Round(
        tokens=8000,
        steps=2,
        seconds=seconds,
        update=1.0,
        loss=5.5,
        counted={
            "read": 6 * GB,
            "written": 4 * GB,
            "stalled": 1.0,
            "stalled: copies of parameters": 0.75,
            "stalled: copies of gradients": 0.25,
            "h2d: bytes": 20 * GB,
            "h2d: copies": 100,
            "h2d: busy": 0.5,
            "d2h: bytes": 0,
            "d2h: copies": 0,
            "d2h: busy": 0.0,
        },
        host=30 * GB,
        pinned=0,
        allocated=10 * GB,
        reserved=12 * GB,
        unusable=GB,
        device_allocations=6,
        retries=0,
        computed=1.5,
    )
    return dataclasses.replace(defaults, **changes)


def measured(name: str, *rounds: Round, wave: int = 1, **facts: Any) -> Measured:
    built = {"host": 31 * GB}
    planned = {"device": 2 * GB, "host": 28 * GB}
    defaults = {
        "built": built,
        "baseline": 2 * GB,
        "planned": planned,
        "budgets": {"device": 20 * GB},
        "pinned_shows": True,
    }
    return Measured(name, dataclasses.replace(CPU, sequence=2000), defaults | facts, list(rounds), wave)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Report("known", {}), Place(tmp_path, 1, GOODBYE), time.monotonic() + 60, turn=2.0)


def setting(**changes: Any) -> Setting:
    defaults = Setting(
        memory=H200, card=140 * GIB, sequence=2048, points=(8192, 16384), peer=None, direct=True, pinned=PINNED
    )  # fmt: skip
    return dataclasses.replace(defaults, **changes)


class TestShape:
    @pytest.mark.parametrize("shape", [TINY, Shape(1024, 3, words=300)], ids=str)
    def test_elements_and_flops_are_those_of_the_module(self, shape: Shape) -> None:
        """torch counts the matrix products of a forward, attention as if nothing were masked."""
        tokens, sequence = 64, 32
        with torch.device("meta"):
            model = Llama(shape)
            words = torch.zeros(tokens // sequence, sequence, dtype=torch.long)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
        assert sum(parameter.numel() for parameter in model.blocks[0].parameters()) == shape.block
        with FlopCounterMode(display=False) as counter:
            model(words, words)
        masked = 2 * shape.blocks * sequence * shape.width
        assert counter.get_total_flops() == tokens * (shape.flops(sequence) // 3 + masked)

    def test_by_size(self) -> None:
        llama_2_7b = of_size(7 * 10**9)
        assert 0.95 < llama_2_7b.parameters / 7e9 <= 1
        assert abs(llama_2_7b.blocks / llama_2_7b.heads - 1) < 0.25
        with pytest.raises(ValueError, match="the smallest shape has"):
            of_size(10**6)

    @pytest.mark.slow
    def test_the_module_computes_what_transformers_does(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        ours = Llama(TINY)
        theirs = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=TINY.words,
                hidden_size=TINY.width,
                intermediate_size=TINY.mlp,
                num_hidden_layers=TINY.blocks,
                num_attention_heads=TINY.heads,
                num_key_value_heads=TINY.heads // 4,
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
            )
        )
        names = {
            "embedding": "model.embed_tokens",
            "norm": "model.norm",
            "head": "lm_head",
            "before_attention": "input_layernorm",
            "before_mlp": "post_attention_layernorm",
            "attention.queries": "self_attn.q_proj",
            "attention.keys": "self_attn.k_proj",
            "attention.values": "self_attn.v_proj",
            "attention.output": "self_attn.o_proj",
            **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        }
        weights = {}
        for name, value in ours.state_dict().items():
            place, _, short = name.removesuffix(".weight").rpartition("blocks.")
            number, _, inner = (
                short.partition(".") if place or name.startswith("blocks.") else ("", "", short)
            )
            layer = f"model.layers.{number}." if number else ""
            weights[f"{layer}{names[inner]}.weight"] = value
        theirs.load_state_dict(weights, strict=True)
        words = torch.randint(TINY.words, (2, 33))
        logits = theirs(words[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        torch.testing.assert_close(ours(words[:, :-1], words[:, 1:]), expected)


class TestWaves:
    def specs(self, *sizes: tuple[int, int]) -> list[Spec]:
        return [
            Spec(str(number), "gpu_step.plain", device=size[0], host=size[1])
            for number, size in enumerate(sizes)
        ]

    def test_units_stay_together_and_memory_holds_each_wave(self) -> None:
        anchor, *others = self.specs((4, 0), (2, 3), (2, 3), (3, 1), (1, 1))
        waves, without = packed([anchor], [others[:2], others[2:3], others[3:]], Memory(9, 7))
        assert [[spec.name for spec in wave] for wave in waves] == [["0", "1", "2", "4"], ["0", "3"]]
        assert without == []

    def test_who_fits_beside_nobody_is_named_and_its_unit_goes_without(self) -> None:
        anchor, small, large = self.specs((4, 0), (2, 3), (2, 8))
        waves, without = packed([anchor], [[small, large]], Memory(9, 7))
        assert waves == [[anchor, small]]
        assert without == [large]


class TestSizes:
    @pytest.mark.parametrize(
        ("memory", "several"), [(H200, False), (SMALL_CARD, True)], ids=["H200", "24 GiB"]
    )
    def test_the_model_that_fits_is_as_large_as_memory_allows(self, memory: Memory, several: bool) -> None:
        """An H200's host holds all sides beside each other, a small card not."""
        on = setting(memory=memory, card=memory.device, peer=Path("python"), shares=(0.5,), resized=True)

        def everyone(shape: Shape) -> tuple[Spec, list[list[Spec]]]:
            of = on.sides(shape, [8192])
            return of.reference(), [*cases.ways(on, of), [of.on_nvme()]]

        def fits_in_budget(shape: Shape) -> bool:
            reference, units = everyone(shape)
            specs = [reference, *(spec for unit in units for spec in unit)]
            assert len(specs) == 9
            on_card = reference.device + next(spec.device for spec in specs if spec.name == sides.PLAIN_TORCH)
            return on_card <= memory.device and sum(spec.host for spec in specs) <= memory.host

        shape = cases.that_fits(on)
        assert shape is not None
        assert fits_in_budget(shape)
        assert not fits_in_budget(of_size(int(shape.parameters * 1.15)))
        reference, units = everyone(shape)
        waves, without = packed([reference], units, memory)
        assert without == []
        assert (len(waves) > 1) is several
        assert all(wave[0] == reference for wave in waves)

    def test_what_the_device_cannot_hold_of_the_larger_model_is_offloaded(self) -> None:
        shape = cases.larger_shape(setting(), 24 * GIB)
        assert shape is not None
        assert 1.15 < 16 * shape.parameters / (24 * GIB) <= 1.25
        of = Sides(shape, 8192, 24 * GIB)
        filled = of.filled()
        ratio = filled.settings["zero"]["offload_optimizer"]["ratio"]
        assert 0 < ratio < 0.9
        resident = (1 - ratio) * 14 * shape.parameters
        assert 0.9 * of.budget < resident + 8 * 2 * shape.words * shape.width <= of.budget
        assert filled.device <= 24 * GIB < of.reference().device
        assert Sides(TINY, 64, 24 * GIB).filled().settings["zero"]["offload_optimizer"]["ratio"] == 0

    @pytest.mark.parametrize(("size", "card"), [(8e8, 140 * GIB), (1.98e9, 24 * GIB)], ids=["fits", "larger"])
    def test_what_each_side_is_expected_to_take_is_what_the_engine_plans(
        self, size: float, card: int, tmp_path: Path
    ) -> None:
        shape = of_size(int(size))
        of = Sides(shape, 8192, card)
        with torch.device("meta"):
            model = Llama(shape)
        specs = [of.offloaded(), of.eager(), of.resized(), of.filled(), of.on_nvme()]
        for spec in specs if card < 16 * shape.parameters else [*specs, of.reference(), of.state_offloaded()]:
            tiering = spec.settings["tiering"] | {"nvme_budget": "1TiB"}
            config = configuration({"directory": str(tmp_path), **spec.settings, "tiering": tiering})
            plan = plan_for(model=model, config=config, gpu_memory=card).plan
            assert plan is not None, spec.name
            device, host = plan.total(Tier.DEVICE), plan.total(Tier.HOST)
            expected = spec.device - CONTEXT - shape.activations(8192), spec.host - PROCESS
            assert 0 <= expected[0] - device <= 2 * GIB, spec.name
            assert -SPARE <= expected[1] - host <= GIB, spec.name
            assert (plan.total(Tier.NVME) > 4 * shape.parameters) is (spec.name == sides.ON_NVME), spec.name

    def test_one_that_neither_card_nor_host_holds_is_left_out(self) -> None:
        assert cases.larger_shape(setting(memory=Memory(140 * GIB, 16 * GIB)), 140 * GIB) is None

    def test_a_step_whose_activations_do_not_fit_is_left_out(self, run: Run) -> None:
        small = setting(memory=SMALL_CARD, card=24 * GIB)
        shape = cases.that_fits(small)
        assert shape is not None
        assert cases.holding(run, small, shape) == [8192]
        assert run.report.skipped == ["16384 tokens per step: its activations do not fit on the card twice"]
        assert cases.holding(run, setting(), of_size(10**9)) == [8192, 16384]


class TestPlain:
    def test_a_round_trains_so_many_steps_and_a_cpu_tells_of_no_device(self) -> None:
        side = plain.build(CPU, {})
        before = [master.clone() for master in side.masters]
        figures = serve.train(side, Meter(), CPU.batches(64), 2)
        assert {int(state["step"]) for state in side.optimizer.state.values()} == {2}
        assert all(not torch.equal(master, old) for master, old in zip(side.masters, before, strict=True))
        for master, parameter in zip(side.masters, side.parameters, strict=True):
            assert torch.equal(parameter.detach(), master.bfloat16())
        assert Round(tokens=64, **figures).steps == 2
        assert figures["computed"] is figures["allocated"] is None
        assert 5 < figures["loss"] < 6  # ln(256)


class TestConclusions:
    def test_the_tables_of_known_rounds(self) -> None:
        updated = {"by the CPU": 6 * GB, "visiting the device": 3 * GB}
        ours = measured(sides.OFFLOADED, a_round(4.0), a_round(5.0), updated=updated)
        theirs = measured(sides.REFERENCE, a_round(2.0, counted={}), a_round(2.5, counted={}))
        report = Report("known", {})
        tables.show(report, "known", [theirs, ours], PINNED)
        text = report.markdown()
        rate = ours.flops(3600.0) / 1e12
        assert (
            f"| {sides.OFFLOADED} | 3,600 (3,200-4,000) | {rate:.1f} | 0.500 (0.500-0.500) | 2.250 | 0.750 | 0.500 |"
            " 22.5% | 5.500 |"
        ) in text
        assert (
            f"{sides.OFFLOADED} stalled for copies of parameters 0.375 s, copies of gradients 0.125 s."
            in text
        )
        assert (
            f"{sides.OFFLOADED} updates its state: 6.00 GB by the CPU, 3.00 GB visiting the device." in text
        )
        assert f"| {sides.REFERENCE} | 7,200 (6,400-8,000) |" in text
        assert (
            f"| {sides.OFFLOADED} | 2.00 | 20.00 | 10.00 | 12.00 | 2.00 | 1.00 | 3.0 | 28.00 | 2.00 | 31.00 | 30.00 |"
            " 0.00 |" in text
        )
        assert (
            f"| {sides.OFFLOADED} | to the device | 10.000 | 200.0 | 40.0 (40.0-40.0) | 0.73 | 11% |" in text
        )
        assert "| to the host |" not in text

    def test_what_a_cpu_cannot_tell_is_a_dash(self) -> None:
        blank = dict.fromkeys(
            ("pinned", "allocated", "reserved", "unusable", "device_allocations", "retries")
        )
        side = measured("known", a_round(computed=None, counted={}, **blank), planned={}, budgets={})
        (row,) = tables.memory("known", [side]).rows
        assert row == ("known", *"--------", "2.00", "31.00", "30.00", "-")
        (row,) = tables.times("known", [side], None).rows
        assert row[3] == row[5] == row[7] == "-"
        (row,) = tables.times("known", [side], None, unoffloaded=side.flops(8000.0)).rows
        assert row[3] == "0.500 by TFLOP/s"

    def test_memory_that_is_not_the_process_s_own_is_told(self) -> None:
        hidden = measured("known", a_round(pinned=8 * GB, retries=3), pinned_shows=False)
        notes = tables.memory("known", [hidden]).notes
        assert "known: torch had to free its cache for memory 3 times." in notes
        assert "known: what torch pinned is not in VmHWM here, and was added." in notes

    def test_copies_are_judged_in_each_direction(self) -> None:
        assert [verdict.holds for verdict in tables.copies(PINNED)] == [True, False]

    @pytest.mark.parametrize(
        ("seconds", "reference", "peer", "host", "holds"),
        [
            (4.4, 4.0, 6.6, 63 * GB, [True, True, True]),
            (4.5, 4.0, 6.6, 62 * GB, [False, False, False]),
        ],
    )
    def test_goals(
        self, run: Run, seconds: float, reference: float, peer: float, host: int, holds: list[bool]
    ) -> None:
        results = [
            measured(sides.REFERENCE, a_round(reference, tokens=8192)),
            measured(sides.OFFLOADED, a_round(seconds, tokens=8192)),
            measured(sides.PEER, a_round(peer, tokens=8192, host=host)),
            measured(sides.PEER, a_round(99.0, tokens=16384, host=host)),
        ]
        verdicts = cases.goals(run, setting(), results)
        assert [verdict.holds for verdict in verdicts] == holds
        assert verdicts[1].what.startswith("tokens/s at 8192 tokens per step: ours, cpu offload / DeepSpeed")

    def test_only_sides_that_ran_beside_each_other_are_compared(self, run: Run) -> None:
        results = [
            measured(sides.OFFLOADED, a_round(tokens=8192), wave=1),
            measured(sides.REFERENCE, a_round(tokens=8192), wave=2),
        ]
        assert cases.goals(run, setting(), results) == []
        assert len(run.report.skipped) == 2
        assert cases.goals(run, setting(card=None), results) == []


class Known:
    """A side of known speed, in seconds per step; it breaks in that round."""

    def __init__(self, seconds: float, breaks: int = 0) -> None:
        self.seconds, self.breaks, self.asked = seconds, breaks, list[tuple[int, int]]()

    def run(self, tokens: int, steps: int, patience: float) -> Round:
        self.asked.append((tokens, steps))
        if len(self.asked) == self.breaks:
            raise SideError("it broke")
        return a_round(steps * self.seconds, tokens=tokens, steps=steps)


class TestRun:
    def test_a_turn_is_about_as_long_for_everyone_and_who_breaks_sits_out(self, run: Run) -> None:
        stand_ins: dict[str, Any] = {"fast": Known(0.25), "slow": Known(9.0), "broken": Known(0.5, breaks=2)}
        rounds = run._alternate(stand_ins, 64, time.monotonic() + 60)
        assert [steps for _, steps in stand_ins["fast"].asked[:3]] == [2, 8, 8]
        assert [steps for _, steps in stand_ins["slow"].asked[:3]] == [2, 1, 1]
        assert len(stand_ins["broken"].asked) == 2
        assert set(rounds) == {"fast", "slow"}
        assert run.failed == ["broken"]

    def test_a_round_that_would_end_too_late_is_not_begun(self, run: Run) -> None:
        stand_ins: dict[str, Any] = {"one": Known(30.0), "other": Known(15.0)}
        rounds = run._alternate(stand_ins, 64, time.monotonic() + 40)
        assert [len(round_) for round_ in rounds.values()] == [1, 1]

    def test_one_that_hangs_is_ended(self, place: Place, interpreter: Callable[[str], Path]) -> None:
        silent = interpreter("echo compiling >&2; exec sleep 600")
        spec = Spec("hung", "gpu_step.plain", on_disk=True, python=silent)
        with (
            Side(spec, CPU, place) as side,
            pytest.raises(SideError, match=r"hung gave no answer within 1 s .*compiling"),
        ):
            side.built(0.6)
        assert list(place.directory.iterdir()) == []


class TestCopies:
    def test_the_first_rounds_are_dropped_and_medians_compared(self) -> None:
        readings = iter([1e9, 1e9, 50e9, 60e9, 52e9])
        rates_by_kind = gpu_copy.in_rounds(3, {"known": lambda: {"h2d": next(readings)}})
        assert gpu_copy.medians(rates_by_kind["known"]) == {"h2d": 52e9}
        rates = {
            "pinned by torch, 64 MiB, alone, to device": {"h2d": [55e9]},
            "pinned by torch, 64 MiB, alone, to host": {"d2h": [54e9]},
            "pinned by torch, 64 MiB, both": {"h2d": [50e9], "d2h": [40e9]},
            "the engine's copies, 64 MiB, both": {"h2d": [45e9], "d2h": [36e9]},
        }
        figures = gpu_copy.summary(rates, 64)
        assert gpu_copy.holds(figures)
        assert Link("a card", 1, "torch", **figures).alone == {"h2d": 55e9, "d2h": 54e9}
        rates["the engine's copies, 64 MiB, both"]["d2h"] = [35e9]
        assert not gpu_copy.holds(gpu_copy.summary(rates, 64))


class TestCarried:
    def test_everything_is_but_what_the_machine_has(self) -> None:
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        assert {"torch", "numpy"} == {
            requirement.split(">")[0]
            for requirement in set(project["dependencies"]) - set(gpu_carry.required())
        }

    def test_a_part_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        ran = subprocess.run(
            [BENCH / "gpu_check.sh", tmp_path, "", "copies", "speed"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 2
        assert "no part is called speed; there are: tests sanitizer io copies step disk" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("resize", [False, True], ids=["slab", "resized"])
def test_on_a_device_ours_counts_the_link_and_what_the_device_stood_still(resize: bool) -> None:
    """On a device of CPU memory: nothing is late there, but everything is counted."""
    from tests.fakes.fake_device import FakeDevice

    of = Sides(TINY, 64, 4 * GIB)
    spec = of.resized() if resize else of.offloaded()
    work = dataclasses.replace(CPU, sequence=32)
    with FakeDevice() as gpu, pytest.MonkeyPatch.context() as patch:
        gpu.run_engines(patch)
        patch.setattr(tiers, "can_exchange", tiers.can_exchange)  # as it was, afterwards
        side = Ours(work, {"directory": None, **spec.settings})
        figures = serve.train(side, Meter(), work.batches(64), 2)
        slab = isinstance(side.engine._tiers.working, DeviceSlab)
        facts = side.facts()
        side.close()
    assert slab is not resize
    counted = figures["counted"]
    # Parameters go twice, as whole groups, but for those that backward finds where forward left them; gradients once.
    assert counted["d2h: bytes"] == 2 * 2 * TINY.parameters
    assert 2 * 2 * TINY.parameters < counted["h2d: bytes"] <= 2 * 4 * TINY.parameters
    assert (
        0 < counted["h2d: copies"] < counted["d2h: copies"] == 2 * len(list(side.engine.module.parameters()))
    )
    assert "stalled" in counted
    (updated,) = facts["updated"].items()
    assert updated == ("by the CPU", pytest.approx(12 * TINY.parameters, rel=1e-3))
    assert facts["planned"]["host"] > 16 * TINY.parameters > facts["planned"]["device"]


@pytest.mark.slow
class TestWhole:
    """The script itself, with a tiny model on the CPU and something that calls itself DeepSpeed."""

    def test_every_side_trains_the_same(
        self, command: Callable[..., tuple[int, str, Any, str]], peers: Path
    ) -> None:
        arguments = ("--tiny", "--seconds", "240", "--peers", str(peers), "--update-on-device", "0.5")
        status, _, raw, output = command("bench_gpu_step.py", *arguments)
        assert status == 0, output
        fitting = {
            (side["name"], tokens)
            for side in raw["sides"]
            for tokens in {round_["tokens"] for round_ in side["rounds"]}
        }
        ways = [sides.REFERENCE, sides.PLAIN_TORCH, sides.OFFLOADED, sides.EAGER, sides.STATE_OFFLOADED]
        ways += [sides.ON_NVME, sides.PEER, f"{sides.OFFLOADED}, 50% updated on the device"]
        assert {(name, 64) for name in [*ways, sides.FILLED]} <= fitting
        assert {(name, 128) for name in ways} <= fitting
        early = [side["rounds"][0]["loss"] for side in raw["sides"] if side["rounds"][0]["tokens"] == 64]
        assert all(4.5 < loss < 6.5 for loss in early), early  # ln(256) is 5.5
        assert raw["goals"] == []
