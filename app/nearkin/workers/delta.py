# size: the entry point names the two parts that this process runs
"""Run the delta stage and the committer in one worker: `python -m nearkin.workers.delta`."""

from nearkin_committer.__main__ import committer
from nearkin_delta.__main__ import placer
from nearkin_shared.kafka.worker import WorkerPart, command

if __name__ == "__main__":
    command("delta", [WorkerPart("delta", "paired", placer), WorkerPart("committer", "placed", committer)])()
