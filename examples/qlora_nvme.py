"""QLoRA: adapters over a frozen model that is stored in 4 bits on NVMe.

    python examples/qlora_nvme.py --nvme /local_nvme
    python examples/qlora_nvme.py --nvme /local_nvme --model Llama-3.3-70B/ --host-budget 16GiB --save adapter/

The options are those of lora_nvme.py. The linear layers are in NF4 with scales that are quantised once more, which
takes 0.516 bytes per weight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import lora_nvme


def main(argv: Sequence[str] | None = None) -> None:
    lora_nvme.main(["--base", "nf4", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    main()
