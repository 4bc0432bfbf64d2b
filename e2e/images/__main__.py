"""`python -m e2e.images [operator] [trainer]`: build our images, and say how large they are."""

import sys

from e2e.images.build import main

if __name__ == "__main__":
    sys.exit(main())
