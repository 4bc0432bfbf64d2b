"""`python -m testcluster.images [operator] [trainer]`: build our images, and say how large they are."""

import sys

from testcluster.images.build import main

if __name__ == "__main__":
    sys.exit(main())
