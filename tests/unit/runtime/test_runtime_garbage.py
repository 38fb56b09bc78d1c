from __future__ import annotations

import gc

from penstock.runtime.garbage import freeze_existing_objects


def test_what_exists_is_no_longer_walked_over() -> None:
    before = len(gc.get_objects())
    freeze_existing_objects()
    try:
        assert gc.get_freeze_count() > before / 2
        assert len(gc.get_objects()) < before / 2
    finally:
        gc.unfreeze()
