"""The mark of tests that `make test` leaves out and `make test-all` runs."""

import os

import pytest

ALL = os.environ.get("GITOPS") == "all"
more = pytest.mark.skipif(not ALL, reason="not among the defaults; set GITOPS=all")
