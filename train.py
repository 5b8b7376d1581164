"""Start a training run: `python train.py --help` lists the options."""

from miles.trainer import leave, main

if __name__ == "__main__":
    leave(main())
