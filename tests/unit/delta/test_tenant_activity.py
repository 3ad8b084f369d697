"""Test which tenants keep a worker busy."""

from __future__ import annotations

from nearkin_delta.tenant_activity import TenantActivity


def after_steps(*steps: dict[str, int]) -> TenantActivity:
    activity = TenantActivity()
    for step in steps:
        for tenant, count in step.items():
            for _ in range(count):
                activity.add(tenant)
        activity.end_step()
    return activity


def test_tenant_with_few_messages_is_minor() -> None:
    activity = after_steps({"flood": 8}, {"flood": 8}, {"quiet": 2})
    assert activity.is_minor("quiet")
    assert not activity.is_minor("flood")


def test_tenant_alone_is_not_minor() -> None:
    """Messages of earlier steps fade."""
    activity = after_steps({"flood": 8}, *[{"quiet": 2}] * 10)
    assert not activity.is_minor("quiet")


def test_ended_step_is_reported_once() -> None:
    activity = TenantActivity()
    activity.add("t")
    assert activity.end_step() == {"t": 1}
    assert activity.end_step() == {}
