"""Several processes on this machine: ``python -m functrain.launch -n 2 SCRIPT``."""

import sys

from functrain.distributed._launch import main

if __name__ == "__main__":
    sys.exit(main())
