"""Record until there is no room, and print how it went as JSON: error, acknowledged.

python record_until_full.py PATH LIMIT: LIMIT is the largest file size in bytes, 0 for none (the file system is small).
"""

from __future__ import annotations

import json
import resource
import sys

import samples

from fliptrace.errors import StorageError
from fliptrace.store import TraceWriter


def main():
    path, limit = sys.argv[1], int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    writer = TraceWriter(path, samples.MANIFEST)
    errors = []
    try:
        for step in range(100_000):
            writer.write_step(*samples.make_step(step))
    except StorageError as error:
        errors.append(str(error))
    try:
        writer.close(samples.CLOSING)
    except StorageError as error:
        errors.append(str(error))
    sys.stdout.write(json.dumps({"errors": errors, "acknowledged": writer.acknowledged}) + "\n")


if __name__ == "__main__":
    main()
