"""The one table of published digests: samples are verified against it, and so is what replicas report to serve."""

from __future__ import annotations

import msgspec

from penstock.errors import LocalProtocolError
from penstock.records.ids import Version
from penstock.records.weights import Manifest

HISTORY = 64
"""Versions that are remembered."""


class PublishedVersions(msgspec.Struct):
    valid: dict[Version, str] = msgspec.field(default_factory=dict)
    """Of the present trainer: samples are trained if they were made with these."""
    withdrawn: dict[Version, list[str]] = msgspec.field(default_factory=dict)
    """Of trainers that are gone. A replica that serves one holds a whole version, but an old one."""

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
        """The trainer began again from a step: what was published after it is of a trainer that is gone."""
        for version in [version for version in self.valid if version > step]:
            self._withdraw(version)

    def _withdraw(self, version: Version) -> None:
        self.withdrawn.setdefault(version, []).append(self.valid.pop(version))

    def check(self) -> None:
        if len(self.valid) > HISTORY:
            raise LocalProtocolError(f"{len(self.valid)} versions are remembered, {HISTORY} allowed")
