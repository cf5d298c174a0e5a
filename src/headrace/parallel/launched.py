"""Ranks that `torchrun` started: how rank 0 and the others get their pipes."""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.parallel.leader import Leader

if TYPE_CHECKING:
    from headrace.config import EngineConfig, LaunchedRank

_KEY = "headrace/pipes"


def lead_launched(config: EngineConfig, launched: LaunchedRank) -> Leader:
    """Be rank 0 of the processes that torchrun started.

    Args:
        config: Settings, with the device resolved.
        launched: This process.

    Raises:
        ConfigError: They are not as many as the settings say, or not all on this machine.
    """
    if launched.size != config.tensor_parallel_size:
        raise ConfigError(
            f"torchrun started {launched.size} processes but tensor_parallel_size is "
            f"{config.tensor_parallel_size}; make them equal (--nproc-per-node)"
        )
    if launched.local_size != launched.size:
        raise ConfigError(
            f"torchrun started {launched.size} processes, {launched.local_size} of them on this "
            "machine; devices that share a model must be on one"
        )
    folder = TemporaryDirectory(prefix="headrace-")
    address, secret = str(Path(folder.name) / "pipes"), os.urandom(32)
    with Listener(address, "AF_UNIX", authkey=secret) as listener:
        _store().set(_KEY, pickle.dumps((address, secret)))
        links = dict(_accept(listener) for _ in range(1, launched.size))
    return Leader(config, [(links[rank], None) for rank in sorted(links)], folder)


def link_to_leader(launched: LaunchedRank) -> Connection:
    """Get the pipe to rank 0, on another rank."""
    # Of processes that the same torchrun started.
    address, secret = pickle.loads(_store().get(_KEY))  # noqa: S301
    link = Client(address, "AF_UNIX", authkey=secret)
    assert isinstance(link, Connection)
    link.send(launched.rank)
    return link


def _accept(listener: Listener) -> tuple[int, Connection]:
    """Which rank has come, and its pipe."""
    link = listener.accept()
    assert isinstance(link, Connection)
    return link.recv(), link


def _store() -> Any:  # noqa: ANN401 - torch does not export the class
    """Torchrun's own store of names and values."""
    store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return store
