# size: the entry point of a process
"""Run several stages of the pipeline in one worker: `python -m nearkin.workers.pipeline`."""

from __future__ import annotations

from pathlib import Path

import click

from nearkin_chunker.__main__ import STAGE as CHUNKER
from nearkin_committer.__main__ import STAGE as COMMITTER
from nearkin_dedup.__main__ import STAGE as DEDUP
from nearkin_delta.__main__ import STAGE as DELTA
from nearkin_resemblance.__main__ import STAGE as RESEMBLANCE
from nearkin_shared.config.pipeline_stages import stage_group, stage_groups
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.kafka.stage_parts import parts_of
from nearkin_shared.kafka.worker import run_process, settings_of, worker_options

STAGES = (CHUNKER, DEDUP, RESEMBLANCE, DELTA, COMMITTER)


@click.command()
@click.option(
    "--stages",
    metavar="STAGE+STAGE...",
    help="The stages of this process. Default: `pipeline.stages` of the settings, if that is one group.",
)
@worker_options
def main(stages: str | None, config_file: Path | None, worker: str, verbose: bool) -> None:
    """Run a worker of several stages until SIGTERM.

    Neighbouring stages pass messages in memory, and only the first one's topic is written and read. Workers with
    different stages share the work, so a fleet may change from one grouping to another while it runs.
    """
    settings = settings_of(config_file)
    chosen = _chosen(stages, settings)
    name = "pipeline" if len(chosen) == len(STAGES) else chosen[0]
    run_process(name, parts_of(STAGES, chosen), settings, config_file, worker, verbose=verbose)


def _chosen(stages: str | None, settings: Settings) -> tuple[str, ...]:
    """Return the stages of this process. Raises click.BadParameter, click.UsageError."""
    if stages is not None:
        try:
            return stage_group(stages)
        except ConfigError as err:
            raise click.BadParameter(str(err), param_hint="--stages") from err
    groups = stage_groups(settings.pipeline.stages)
    if len(groups) > 1:
        known = ", ".join("+".join(group) for group in groups)
        raise click.UsageError(
            f'pipeline.stages "{settings.pipeline.stages}" has {len(groups)} groups: choose one by --stages, of {known}'
        )
    return groups[0]


if __name__ == "__main__":
    main()
