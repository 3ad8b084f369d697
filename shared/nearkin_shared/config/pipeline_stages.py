# size: the one place that knows the order of the stages, for settings, workers, tests and the chart
"""Decide which stages of the pipeline share a process.

Invariant: every stage is in exactly one group.
"""

from __future__ import annotations

from nearkin_shared.errors import ConfigError

STAGE_TOPICS_OF = {
    "chunker": "frames",
    "dedup": "segments",
    "resemblance": "fresh",
    "delta": "paired",
    "committer": "placed",
}
"""The topic that each stage reads, in the order of the pipeline."""
PIPELINE_STAGES = tuple(STAGE_TOPICS_OF)
FUSED = "+".join(PIPELINE_STAGES)
GROUPS_BY_NAME = {"fused": FUSED, "split": "chunker,dedup,resemblance,delta+committer"}


def stage_group(text: str) -> tuple[str, ...]:
    """Return the stages of one group, in the order of the pipeline.

    `dedup+chunker` is (chunker, dedup). Raises ConfigError.
    """
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in PIPELINE_STAGES:
            raise ConfigError(f"{name!r:.40}: no stage has this name; known are {', '.join(PIPELINE_STAGES)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{text!r:.80}: contains a stage twice; remove one")
    return tuple(name for name in PIPELINE_STAGES if name in names)


def stage_groups(text: str) -> list[tuple[str, ...]]:
    """Return the groups that a text names.

    `fused`, `split`, or stages with `+` within a group and commas between groups.

    Raises: ConfigError if a stage is unknown, missing, or in two groups.
    """
    groups = [stage_group(group) for group in GROUPS_BY_NAME.get(text, text).split(",")]
    held = [stage for group in groups for stage in group]
    missing = [stage for stage in PIPELINE_STAGES if stage not in held]
    if missing:
        raise ConfigError(f"{text!r:.80}: no group has {', '.join(missing)}; accepted blobs would wait there for ever")
    if len(held) > len(PIPELINE_STAGES):
        raise ConfigError(f"{text!r:.80}: a stage is in two groups; leave it in one")
    return groups
