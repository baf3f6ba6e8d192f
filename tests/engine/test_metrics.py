"""Statistics to Prometheus text, under the names that dashboards know."""

from __future__ import annotations

from octavo.core.interfaces import StepStats
from octavo.core.sampling_params import SamplingParams
from octavo.metrics import Metrics, RequestTimes

TIMES = RequestTimes(arrived_at=10.0, scheduled_at=10.125, first_token_at=10.25, last_token_at=10.5, ended_at=10.5)


def test_gauges_follow_the_last_step_and_counters_add_up() -> None:
    metrics = Metrics("m", 100)
    busy = StepStats(
        num_running=3,
        num_waiting=2,
        num_blocks=10,
        num_free_blocks=4,
        num_cached_blocks=1,
        num_used_blocks=5,
        num_preemptions=1,
        num_prefix_query_tokens=32,
        num_prefix_hit_tokens=16,
    )
    metrics.push_step(busy)
    metrics.push_step(busy)
    assert metrics.read("num_requests_running") == 3
    assert metrics.read("num_requests_waiting") == 2
    assert metrics.read("kv_cache_usage_perc") == 0.5
    assert [metrics.read("num_blocks", state=state) for state in ("free", "cached", "used")] == [4, 1, 5]
    assert metrics.read("num_unowned_blocks") == 0
    assert metrics.read("num_preemptions_total") == 2
    assert metrics.read("prefix_cache_queries_total") == 64
    assert metrics.read("prefix_cache_hits_total") == 32
    metrics.push_step(StepStats(num_blocks=10, num_free_blocks=10))
    assert metrics.read("num_requests_running") == 0
    assert metrics.read("kv_cache_usage_perc") == 0
    assert metrics.read("num_preemptions_total") == 2


def test_a_lost_block_shows() -> None:
    metrics = Metrics("m", 100)
    metrics.push_step(StepStats(num_blocks=10, num_free_blocks=8, num_used_blocks=1))
    assert metrics.read("num_unowned_blocks") == 1


def test_every_way_to_end_has_a_counter_from_the_start() -> None:
    metrics = Metrics("m", 100)
    metrics.push_finished_sequence("abort")
    counts = [
        metrics.read("request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")
    ]
    assert counts == [0, 0, 1, 0]


def test_the_text_has_prefix_label_and_the_known_names() -> None:
    metrics = Metrics("some/model", 100)
    metrics.push_first_token(7, 0.1)
    metrics.push_tokens(3)
    metrics.push_token_gap(0.01)
    metrics.push_finished_request(7, [3], SamplingParams(max_tokens=9), TIMES)
    metrics.push_restart()
    text = metrics.render().decode()
    for line in (
        'octavo:num_requests_running{model_name="some/model"} 0.0',
        'octavo:prompt_tokens_total{model_name="some/model"} 7.0',
        'octavo:generation_tokens_total{model_name="some/model"} 3.0',
        'octavo:engine_restarts_total{model_name="some/model"} 1.0',
        'octavo:time_to_first_token_seconds_count{model_name="some/model"} 1.0',
        'octavo:inter_token_latency_seconds_count{model_name="some/model"} 1.0',
        'octavo:e2e_request_latency_seconds_sum{model_name="some/model"} 0.5',
        'octavo:request_prompt_tokens_bucket{le="10.0",model_name="some/model"} 1.0',
        'octavo:request_generation_tokens_bucket{le="2.0",model_name="some/model"} 0.0',
        'octavo:request_queue_time_seconds_sum{model_name="some/model"} 0.125',
        'octavo:request_prefill_time_seconds_sum{model_name="some/model"} 0.125',
        'octavo:request_decode_time_seconds_sum{model_name="some/model"} 0.25',
        'octavo:request_inference_time_seconds_sum{model_name="some/model"} 0.375',
        'octavo:time_per_output_token_seconds_sum{model_name="some/model"} 0.125',
        'octavo:request_time_per_output_token_seconds_sum{model_name="some/model"} 0.125',
        'octavo:request_params_n_sum{model_name="some/model"} 1.0',
        'octavo:request_params_max_tokens_sum{model_name="some/model"} 9.0',
        'octavo:request_max_num_generation_tokens_sum{model_name="some/model"} 3.0',
    ):
        assert line in text, line


def test_two_engines_do_not_share_a_registry_and_the_prefix_can_be_chosen() -> None:
    first, second = Metrics("m", 100), Metrics("m", 100, prefix="vllm:")
    first.push_tokens(5)
    assert second.read("generation_tokens_total") == 0
    assert b"vllm:generation_tokens_total" in second.render()


def test_no_times_of_creation_are_shown() -> None:
    metrics = Metrics("m", 100)
    metrics.push_step(StepStats(num_blocks=10))
    assert b"_created" not in metrics.render()
    assert b"octavo:num_preemptions_total" in metrics.render()
