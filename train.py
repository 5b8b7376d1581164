"""Start a training run: `python train.py --help` lists the options."""

import sys

from miles.trainer import main

if __name__ == "__main__":
    sys.exit(main())
