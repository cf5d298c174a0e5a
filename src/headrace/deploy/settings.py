"""How many replicas there are, and who gets which request."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySettings:
    """Settings of the deployment; those of each replica are EngineConfig and ServerSettings.

    Args:
        min_replicas: Replicas that are always there.
        max_replicas: Most replicas; with more than min_replicas their number follows the load.
        routers: Processes that pick replicas.
        target_requests: Requests in flight for each replica that autoscaling aims at.
        max_requests: Most requests in flight in one replica, waiting ones included; more wait in
            the router.
        max_extra_load: A replica that holds a prompt's beginning is passed over once it has so
            many requests in flight more than the least loaded one.
        max_retries: Other replicas that a request is sent to after one was lost before it had
            answered anything.
        summary_period_s: Seconds between two summaries of what a replica holds.
        max_summary_keys: Most prefixes in a summary; each takes 8 bytes.
        cpus: CPU cores that Ray reserves for each replica.
        gpus: GPUs that Ray reserves for each replica; None takes as many as the engine uses, by the
            machine that deploys: give it where that one has no GPU and the others have.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    routers: int = 1
    target_requests: float = 32.0
    max_requests: int = 1024
    max_extra_load: int = 16
    max_retries: int = 2
    summary_period_s: float = 1.0
    max_summary_keys: int = 8192
    cpus: float = 1.0
    gpus: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "min_replicas", "routers", "target_requests", "max_requests", "max_extra_load",
            "summary_period_s", "max_summary_keys",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_retries", "cpus", "gpus"):
            if not (getattr(self, name) or 0) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas} but min_replicas is {self.min_replicas}; "
                "raise max_replicas"
            )
