"""`python -m testcluster.images [operator] [trainer]`: build the images and print their sizes."""

import sys

from testcluster.images.build import main

if __name__ == "__main__":
    sys.exit(main())
