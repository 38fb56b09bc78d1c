"""The one table of published digests. Samples and the reports of replicas are verified against it."""

from __future__ import annotations

import msgspec

from penstock.errors import LocalProtocolError
from penstock.records.ids import Version
from penstock.records.weights import Manifest

HISTORY = 64
"""Versions that are kept."""


class PublishedVersions(msgspec.Struct):
    valid: dict[Version, str] = msgspec.field(default_factory=dict)
    """Published by the current trainer: samples generated with these are trained."""
    withdrawn: dict[Version, list[str]] = msgspec.field(default_factory=dict)
    """Published by replaced trainers. A replica that serves one holds a complete version, but an old one."""

    def add(self, manifest: Manifest) -> None:
        version = manifest.version
        if self.valid.get(version, manifest.digest) != manifest.digest:
            self._withdraw(version)
        self.valid[version] = manifest.digest
        for digests in (self.valid, self.withdrawn):
            for old in [old for old in digests if old <= version - HISTORY]:
                del digests[old]

    def has(self, version: Version, digest: str) -> bool:
        """Whether these weights were published, by this trainer or an earlier one."""
        return self.valid.get(version) == digest or digest in self.withdrawn.get(version, ())

    def withdraw_after(self, step: int) -> None:
        """The trainer restarted from a step: withdraws the versions that its predecessor published after it."""
        for version in [version for version in self.valid if version > step]:
            self._withdraw(version)

    def _withdraw(self, version: Version) -> None:
        self.withdrawn.setdefault(version, []).append(self.valid.pop(version))

    def check(self) -> None:
        if len(self.valid) > HISTORY:
            raise LocalProtocolError(f"{len(self.valid)} versions are kept, at most {HISTORY} are allowed")
