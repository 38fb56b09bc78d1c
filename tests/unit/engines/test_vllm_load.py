"""The load of a vLLM server, as its metrics report it."""

from __future__ import annotations

from penstock.engines.vllm.server import ServerLoad


def metrics(decoding: int, waiting: int, preemptions: int, cache_used: float) -> str:
    """Of a server that decodes in two processes."""
    return f"""# HELP vllm:num_requests_running
vllm:num_requests_running{{engine="0",model_name="m"}} {decoding - 2}.0
vllm:num_requests_running{{engine="1",model_name="m"}} 2.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 9.0
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {cache_used}
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.125
"""


def test_the_load_is_read_from_the_metrics() -> None:
    load = ServerLoad()
    for now in (10.0, 11.0):
        load.read(metrics(16, 7, 2, 0.25), now, 0.0)
    found = {"requests_decoding": 12.0, "requests_waiting": 9.0, "preemptions": 3.0, "cache_used": 0.9375}
    assert load.read(metrics(12, 9, 5, 0.9375), 12.0, 0.0) == found


def test_preemptions_by_a_pause_do_not_count() -> None:
    """A sequence observed on a GPU that decoded 256 requests."""
    load = ServerLoad()
    load.read(metrics(256, 256, 0, 0.01), 10.0, 0.0)
    before = load.read(metrics(256, 256, 0, 0.01), 11.0, 0.0)
    assert before["requests_waiting"] == 256.0
    assert load.read(metrics(256, 256, 0, 0.01), 12.0, None) == {}  # paused
    assert load.read(metrics(256, 256, 0, 0.01), 13.0, 12.5) == {}  # stale metrics
    assert load.read(metrics(20, 492, 20, 0.001), 14.0, 12.5) == {}  # prefill is repeated
    assert load.read(metrics(256, 256, 256, 0.01), 15.0, 12.5) == {}
    assert load.read(metrics(256, 256, 256, 0.01), 16.0, 12.5) == before
    assert load.read(metrics(256, 256, 512, 0.01), 19.0, 17.5) == {}  # a whole pause between two reads
    assert load.read(metrics(256, 256, 512, 0.01), 20.0, 17.5) == before
    assert load.read(metrics(200, 312, 515, 0.99), 21.0, 17.5)["preemptions"] == 3.0
