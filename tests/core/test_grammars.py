"""Constrained sequences: a grammar each, kept through preemptions; its failure ends its own sequence only."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.interfaces import FinishReason, GrammarSpec
from octavo.errors import InvalidRequestError
from tests.core.tiny_core import EOS, TinyCore, tokens_alone
from tests.fakes import FakeGrammar

SPEC = GrammarSpec("regex", "a+")


def make_core(make: Callable[[], FakeGrammar], **options: int) -> tuple[TinyCore, list[FakeGrammar]]:
    core = TinyCore(**options)
    made: list[FakeGrammar] = []

    def factory(spec: GrammarSpec) -> FakeGrammar:
        assert spec == SPEC
        made.append(make())
        return made[-1]

    core.core.grammar_factory = factory
    return core, made


def three_words() -> FakeGrammar:
    return FakeGrammar([{5, 6}, {7}, {8}], (EOS,))


def test_a_complete_grammar_ends_the_sequence_with_its_last_token() -> None:
    core, made = make_core(three_words)
    core.add("a", range(5), grammar=SPEC)
    core.add("b", range(5))
    core.finish()
    assert core.tokens("a") == [5, 7, 8]
    (final,) = core.finals("a")
    assert (final.finish_reason, final.stop_reason, final.ends_in_text) == (FinishReason.STOP, None, True)
    assert core.tokens("b") == tokens_alone(range(5))
    assert made[0].accepted == [5, 7, 8]


def test_an_end_token_ends_it_and_is_no_text() -> None:
    core, _ = make_core(lambda: FakeGrammar([{5}], (EOS,), is_open=True))
    core.add("a", range(5), grammar=SPEC)
    core.finish()
    assert core.tokens("a") == [5, EOS]
    assert core.finals("a")[0].finish_reason is FinishReason.STOP
    assert not core.finals("a")[0].ends_in_text


def test_neither_min_tokens_nor_ignore_eos_goes_beyond_a_complete_text() -> None:
    for params in ({"min_tokens": 6}, {"ignore_eos": True}):
        for is_open in (False, True):
            core, _ = make_core(lambda is_open=is_open: FakeGrammar([{5}, {6, EOS}], (EOS,), is_open))  # type: ignore[misc]
            core.add("a", range(5), grammar=SPEC, **params)
            core.finish()
            assert core.tokens("a") == [5, 6, EOS][: 2 + is_open]
            assert core.finals("a")[0].finish_reason is FinishReason.STOP


def test_max_tokens_cuts_the_text() -> None:
    core, _ = make_core(three_words)
    core.add("a", range(5), grammar=SPEC, max_tokens=2)
    core.add("b", range(5), grammar=SPEC, max_tokens=3)
    core.finish()
    assert core.finals("a")[0].finish_reason is FinishReason.LENGTH
    assert core.finals("b")[0].finish_reason is FinishReason.STOP


def test_each_of_n_generations_has_a_grammar_of_its_own() -> None:
    core, made = make_core(three_words)
    core.add("a", range(5), grammar=SPEC, n=3)
    core.finish()
    assert [grammar.accepted for grammar in made] == [[5, 7, 8]] * 3


def test_preemption_keeps_the_state() -> None:
    core, made = make_core(lambda: FakeGrammar([{t} for t in range(20, 32)]), num_blocks=7)
    for name in ("a", "b"):
        core.add(name, range(5), grammar=SPEC, max_tokens=12, salt=name)
    num_preemptions = 0
    while core.core.has_unfinished():
        num_preemptions += core.step().stats.num_preemptions
    assert num_preemptions > 0
    assert core.tokens("a") == core.tokens("b") == list(range(20, 32))
    assert len(made) == 2


def test_a_failing_factory_refuses_its_own_request_only() -> None:
    core = TinyCore()
    core.add("a", range(5), grammar=SPEC)
    assert "nothing to compile it with" in str(core.finals("a")[0].error)

    def factory(spec: GrammarSpec) -> FakeGrammar:
        raise InvalidRequestError("The regex cannot be used.") if spec == SPEC else RuntimeError("oops")

    core.core.grammar_factory = factory
    core.add("b", range(5), grammar=SPEC, n=2)
    core.add("c", range(5), grammar=GrammarSpec("lark"))
    core.add("d", range(5))
    assert [output.error for output in core.told if output.request_id == "b"] == ["The regex cannot be used."] * 2
    assert core.finals("c")[0].error == "The grammar of this sequence failed (RuntimeError: oops)."
    core.finish()
    assert core.tokens("d") == tokens_alone(range(5))


def test_a_token_that_the_grammar_does_not_take_ends_its_own_sequence_only() -> None:
    core, _ = make_core(lambda: FakeGrammar([{5}, {6}, None], is_open=True))
    core.executor.choose = lambda scheduled: 5 if scheduled.seq_id == 0 else None
    core.add("a", range(5), grammar=SPEC)
    core.add("b", range(5))
    core.finish()
    assert core.tokens("a") == [5]
    assert "token 5 is not allowed" in str(core.finals("a")[0].error)
    assert core.finals("a")[0].finish_reason is FinishReason.ERROR
    assert core.tokens("b") == tokens_alone(range(5))
