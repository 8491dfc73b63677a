"""Build one random-weight checkpoint.

python -m models.tiny --arch qwen3_vl --out tiny-qwen3-vl
"""

from __future__ import annotations

import argparse
from pathlib import Path

from models.tiny import ARCHITECTURES, build


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a random-weight checkpoint.")
    parser.add_argument("--arch", choices=ARCHITECTURES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.arch, options.out, options.seed)
    total_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.arch}: {total_bytes / 1e6:.1f} MB in {options.out}")


if __name__ == "__main__":
    main()
