"""`python -m support.stores.publish URI FOLDER DIGEST [CALL]`: publish, and die before one call of the bucket."""

import os
import signal
import sys
from pathlib import Path

from support.stores.models import names_in

from finetune_trainer.stores.objects.bucket import locate_objects
from finetune_trainer.stores.objects.open_bucket import open_bucket
from finetune_trainer.stores.objects.store import ObjectTarget


class DyingBucket:
    """A bucket whose process is killed before a certain call that writes, counted from 0."""

    def __init__(self, bucket, call):
        self.bucket = bucket
        self.calls = iter(range(call, -1, -1))

    def __getattr__(self, name):
        if name in {"upload", "replace"} and next(self.calls) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self.bucket, name)


if __name__ == "__main__":
    uri, folder, digest, *call = sys.argv[1:]
    bucket = open_bucket(locate_objects(uri))
    target = ObjectTarget(uri, DyingBucket(bucket, int(call[0])) if call else bucket)
    print(target.publish(Path(folder), digest, names_in(Path(folder))).sent_bytes)
