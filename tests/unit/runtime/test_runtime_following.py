from pathlib import Path

from penstock.runtime.following import Following
from penstock.runtime.logs import rotate


def test_a_log_that_was_rotated_is_read_from_its_start(tmp_path: Path):
    path = tmp_path / "p.trainer.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"chatter\n" * 100)
        following = Following(path)
        assert len(following.read()) == 100
        assert rotate(tmp_path, 64) == [path.name]
        assert following.read() == []
        log.write(b"after\n")
        assert following.read() == [b"after"]
        log.write(b"more\nto")
        assert following.read() == [b"more"]
