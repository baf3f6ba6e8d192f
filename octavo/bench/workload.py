"""What is asked of an engine: prompts of known length, how many tokens of each, when. Seeded; standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError

FIXED, RAGGED, SHARED_PREFIX, LONG_PROMPT = SCENARIOS = ("fixed", "ragged", "shared-prefix", "long-prompt")

# One token each after a space, in the vocabularies of SmolLM2 and Gemma 3; how long a prompt became is in `usage`.
_WORDS = """
river stone garden window market bridge summer winter silver golden yellow purple orange forest island valley
mountain ocean weather morning evening kitchen dinner coffee bread butter sugar music guitar piano theater paper pencil
letter number circle square triangle planet rocket engine wheel station airport travel ticket hotel village castle tower
church school teacher doctor lawyer farmer soldier sailor captain king queen prince brother sister father mother cousin
friend neighbor animal horse cattle chicken rabbit tiger monkey eagle snake spider insect flower tree leaf root branch
seed grass field desert storm thunder cloud rain snow wind fire water earth metal iron copper glass cotton leather wool
silk button jacket shirt shoes hat glove mirror candle lamp table chair door floor wall roof ceiling corner street road
path track train boat ship plane truck bicycle signal camera phone radio screen keyboard memory dream story poem novel
chapter page line word sentence language history science physics chemistry biology energy force motion speed distance
height weight volume pressure heat light sound color shape pattern texture surface edge center border north south east
west march minute hour second week month year century today tomorrow yesterday early late quick slow heavy soft hard
bright dark empty full open closed simple complex common rare ancient modern public private local foreign famous gentle
strong weak brave honest clever quiet loud warm cold fresh sweet bitter sharp smooth rough""".split()  # noqa: SIM905
# Of the longer requests' max_tokens, the shorter half of a ragged load asks for one in so many.
_RAGGED_FACTOR = 6
_WARMUP_PROMPT_TOKENS, WARMUP_MAX_TOKENS = 32, 8
_DEFAULT_LENGTHS = {FIXED: (128, 64), RAGGED: (64, 120), SHARED_PREFIX: (32, 32), LONG_PROMPT: (24, 160)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """prompt_tokens: of each prompt; with a shared prefix, what is each request's own
    max_tokens:    generated tokens of each request; ragged: half of the requests want this, half a sixth of it
    """

    scenario: str
    prompt_tokens: int
    max_tokens: int
    shared_prefix_tokens: int = 512
    long_prompt_tokens: int = 2000
    long_max_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """due_s: seconds after the start of the run at which it is sent; None: as soon as there is a free user"""

    prompt: str
    max_tokens: int
    due_s: float | None = None
    is_long_prompt: bool = False


def make_workload(
    scenario: str, prompt_tokens: int | None = None, max_tokens: int | None = None, seed: int = 0
) -> Workload:
    """Lengths that are None are the scenario's own. Raises ConfigError."""
    if scenario not in SCENARIOS:
        raise ConfigError(
            f"--scenario is {scenario!r}, but it must be one of {', '.join(SCENARIOS)}.", option="--scenario"
        )
    own_prompt_tokens, own_max_tokens = _DEFAULT_LENGTHS[scenario]
    for option, value in (("--prompt-tokens", prompt_tokens), ("--max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} is {value}, but it must be at least 1.", option=option)
    return Workload(
        scenario=scenario,
        prompt_tokens=prompt_tokens or own_prompt_tokens,
        max_tokens=max_tokens or own_max_tokens,
        seed=seed,
    )


def plan_requests(workload: Workload, num_requests: int, round_index: int = 0) -> list[PlannedRequest]:
    """The same for the same workload, number and round; no prompt of one round comes again in another.

    The long-prompt scenario has one request more, the last: the long one.
    """
    rng = random.Random(f"{workload}/{num_requests}/{round_index}")
    prefix = make_prompt(rng, workload.shared_prefix_tokens) + " " if workload.scenario == SHARED_PREFIX else ""
    lengths = [workload.max_tokens] * num_requests
    if workload.scenario == RAGGED:
        lengths[1::2] = [max(workload.max_tokens // _RAGGED_FACTOR, 1)] * (num_requests // 2)
        rng.shuffle(lengths)
    planned = [
        PlannedRequest(prompt=prefix + make_prompt(rng, workload.prompt_tokens), max_tokens=length)
        for length in lengths
    ]
    if workload.scenario == LONG_PROMPT:
        planned.append(
            PlannedRequest(
                prompt=make_prompt(rng, workload.long_prompt_tokens),
                max_tokens=workload.long_max_tokens,
                is_long_prompt=True,
            )
        )
    return planned


def plan_arrivals(workload: Workload, rate: float, duration_s: float, round_index: int = 0) -> list[PlannedRequest]:
    """Requests that come by chance, `rate` a second on average, for `duration_s` seconds."""
    times = poisson_times(random.Random(f"{workload.seed}/{rate}/{duration_s}/{round_index}"), rate, duration_s)
    return [
        PlannedRequest(prompt=request.prompt, max_tokens=request.max_tokens, due_s=due_s)
        for due_s, request in zip(times, plan_requests(workload, len(times), round_index), strict=False)
    ]


def plan_warmup(seed: str, num_requests: int) -> list[PlannedRequest]:
    rng = random.Random(f"warm-up/{seed}")
    return [
        PlannedRequest(prompt=make_prompt(rng, _WARMUP_PROMPT_TOKENS), max_tokens=WARMUP_MAX_TOKENS)
        for _ in range(num_requests)
    ]


def poisson_times(rng: random.Random, rate: float, duration_s: float) -> list[float]:
    """The times, below duration_s, of a Poisson process: gaps between them are exponential with mean 1 / rate."""
    times: list[float] = []
    now = rng.expovariate(rate)
    while now < duration_s:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def make_prompt(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))


def random_token_ids(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """From the middle of the vocabulary, where no special tokens are."""
    return [rng.randrange(vocab_size // 4, max(vocab_size // 2, vocab_size // 4 + 1)) for _ in range(num_tokens)]


def parse_counts(option: str, text: str) -> list[int]:
    """ "1,4,16" -> [1, 4, 16]. Raises ConfigError."""
    counts = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if not counts or len(counts) != len(text.split(",")) or min(counts) < 1:
        raise ConfigError(
            f"{option} is {text!r}, but it must be whole numbers from 1, such as 1,4,16,64.", option=option
        )
    return counts


def default_num_requests(concurrency: int) -> int:
    """Enough that the start and the end of a run weigh little, few enough to wait for."""
    return max(4, 2 * concurrency) if concurrency < 64 else concurrency


def total_tokens(requests: Sequence[PlannedRequest]) -> int:
    return sum(request.max_tokens for request in requests)
