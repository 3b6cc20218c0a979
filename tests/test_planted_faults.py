"""Each guard is shown to fail: a fault is planted in a copy of the package, and the test that should find it must be red.

A fault is a piece of source text that stands exactly once in its file, and what takes its place. All these tests must pass in the copy
before anything is planted there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
_POSITIONS = "tests/engine/test_drafted_positions.py"
_RANDOM = "tests/engine/test_random_requests.py"
_OWN = "tests/engine/test_misbehaving_drafters.py"
_ROWS = f"{_OWN}::test_every_row_says_what_plain_decoding_says"
_WORDS = "tests/sampling/test_constraints.py"
_LIMITS = "tests/server/test_limits.py"
_WORK = "tests/sampling/test_work.py"
_SHARES = "tests/engine/test_shares.py"
_PIECES = "tests/loading/test_pieces.py"
_TRUNCATE = "tests/sampling/test_truncate.py"
_BLOCKWISE = "tests/sampling/test_blocks.py"
_LOAD = "tests/engine/test_load_order.py"
_MEMORY = "tests/engine/test_memory.py"
_PACKED = "tests/models/test_packed_on_cpu.py"
_PROPOSALS = "tests/drafters/test_proposals.py"
_ACCOUNT = "tests/speculation/test_account.py::test_nothing_is_lost_beyond_credit_and_share"
_STREAMS = "tests/server/test_forms.py::test_streams_of_500_random_answers_follow_the_grammar"
_RESPONSES = "tests/server/test_responses.py"
_SHOWN = "tests/drafters/test_layer_streams.py"
_EAGLE = "tests/drafters/test_eagle3.py"
_DISK = "tests/engine/test_prefix_disk.py"
_RESTART = "tests/engine/test_prefix_restart.py"
_BLOCKS = "tests/models/test_dflash_model.py"
_FIELD = "tests/engine/test_images_in_the_field.py"
_OVERLAPPED = "tests/drafters/test_dflash.py::test_drafts_behind_rounds_that_nobody_has_read"


class Fault(NamedTuple):
    """file: below mlxspec/. test: a pytest node id, which may end in the parameters of one case."""

    name: str
    file: str
    old: str
    new: str
    test: str


FAULTS = (
    Fault(
        "the last block of a message is not stopped",
        "server/single_answer.py",
        "            for event in self._blocks.close():\n                yield from self._written(event, {})\n",
        "",
        f"{_STREAMS}[messages]",
    ),
    Fault(
        "a thinking block is not signed",
        "server/messages_api.py",
        'if block.kind == "thinking":\n                delta',
        "if False:\n                delta",
        f"{_STREAMS}[messages]",
    ),
    Fault(
        "two events of a response have one number",
        "server/responses_api.py",
        'yield self._event("response.output_item.added", output_index=block.number, item=item)',
        'yield self._event("response.output_item.added", output_index=block.number, item=item)\n            self._num_events -= 1',
        f"{_STREAMS}[responses]",
    ),
    Fault(
        "a call of Ollama's stream comes while it is written",
        "server/ollama_api.py",
        "if isinstance(event, BlockEnd):",
        "if not isinstance(event, BlockEnd):",
        f"{_STREAMS}[ollama]",
    ),
    Fault(
        "an answer may end before its grammar has begun",
        "sampling/constraints.py",
        "return mask if self._is_grammar_on(state) else _both(mask, self._all_but_ends)",
        "return mask",
        f"{_WORDS}::test_an_answer_does_not_end_before_its_grammar_has_begun",
    ),
    Fault(
        "all calls of a stream have one place",
        "server/chat.py",
        "number = self._blocks.calls.index(block)",
        "number = 0",
        f"{_STREAMS}[chat]",
    ),
    Fault(
        "a billing line stays in the system prompt",
        "server/messages_api.py",
        'return _BUDGET.sub("", _BILLING.sub("", system))',
        'return _BUDGET.sub("", system)',
        "tests/server/test_messages.py::test_a_billing_line_and_a_budget_are_left_out_of_the_system_prompt",
    ),
    Fault(
        "stored responses have no budget",
        "server/stored_responses.py",
        "while self._kept and self.num_bytes + num_bytes > self._max_bytes:",
        "while False:",
        f"{_RESPONSES}::test_stored_responses_keep_to_a_budget_and_a_time",
    ),
    Fault(
        "states on disk are told apart by weights alone",
        "engine/prefix_disk/signature.py",
        'found = hashlib.sha256("\\n".join(_settings(module)).encode())',
        "found = hashlib.sha256()",
        f"{_RESTART}::test_settings_of_the_same_weights_count",
    ),
    Fault(
        "a vocabulary of a block drafter's own is not looked up",
        "models/dflash.py",
        "self.ids = target_ids(self.d2t, self.config.text.vocab_size, self.title)",
        "self.ids = None",
        "tests/models/test_load_dflash.py::test_the_speculators_layout[150]",
    ),
    Fault(
        "stored responses stay for ever",
        "server/stored_responses.py",
        "if kept.until <= now",
        "if False",
        f"{_RESPONSES}::test_stored_responses_keep_to_a_budget_and_a_time",
    ),
    Fault(
        "a block drafter's context begins a position late",
        "models/dflash.py",
        "turns = Places(rows, cache.lengths, cache.exact)",
        "turns = Places(rows, [n + 1 for n in cache.lengths])",
        f"{_BLOCKS}::test_blocks_behind_a_growing_context[DFlash-False]",
    ),
    Fault(
        "a window of a block drafter is a token too wide",
        "models/dflash.py",
        "seen = min(window - 1, cache.lengths[r])",
        "seen = min(window, cache.lengths[r])",
        f"{_BLOCKS}::test_blocks_behind_a_growing_context[DFlash-False]",
    ),
    Fault(
        "convolutions of a block reach into the row before",
        "models/dflash.py",
        "seen = mx.where((places >= t)[:, None, None], seen, 0)",
        "seen = seen",
        f"{_BLOCKS}::test_ragged_rows[DFlash2]",
    ),
    Fault(
        "a block drafter's tokens are drawn with the noise of the position before",
        "drafters/dflash.py",
        "positions = _positions([len(a.history) + d for a, d in each]",
        "positions = _positions([len(a.history) + d - 1 for a, d in each]",
        "tests/drafters/test_dflash.py::test_noise_is_that_of_the_position",
    ),
    Fault(
        "a drafter in order goes by the anchor at every place",
        "drafters/dflash.py",
        "before = drawn.tokens if len(left) == len(rows) else drawn.tokens[mx.array(left, mx.int32)]",
        "before = before if len(left) == len(rows) else before[mx.array(left, mx.int32)]",
        "tests/drafters/test_dflash.py::test_proposals_are_those_of_the_reference[DSpark]",
    ),
    Fault(
        "levels of a body are counted in its bytes",
        "server/body.py",
        'check_shape(raw if encoding.startswith("utf-8") else text.encode(), limits)',
        "check_shape(raw, limits)",
        f"{_LIMITS}::test_levels_are_counted_in_every_encoding",
    ),
    Fault(
        "values of a body are not counted",
        "server/body.py",
        "if num_values > limits.max_values:",
        "if False:",
        f"{_LIMITS}::test_values_are_counted_before_they_are_made",
    ),
    Fault(
        "half a request is waited for without end",
        "server/connections.py",
        "self.loop.call_later(self._door.limits.header_seconds, self._late)",
        "self.loop.call_later(3600, self._late)",
        f"{_LIMITS}::test_half_a_request_ends_in_time",
    ),
    Fault(
        "connections have no bound",
        "server/connections.py",
        "while len(self.open) >= self.most:",
        "while False:",
        f"{_LIMITS}::test_more_connections_than_descriptors",
    ),
    Fault(
        "log lines have no rate",
        "server/log.py",
        "if self._left < 1:",
        "if False:",
        f"{_LIMITS}::test_log_lines_have_a_rate",
    ),
    Fault(
        "clients do not take turns",
        "server/fairness.py",
        "self._waiting.move_to_end(client)",
        "pass",
        f"{_LIMITS}::test_clients_take_turns_in_a_lane",
    ),
    Fault(
        "work goes on though its client has gone",
        "server/fairness.py",
        "if self._is_void:",
        "if False:",
        f"{_LIMITS}::test_work_that_nobody_waits_for_ends",
    ),
    Fault(
        "bad words have no bound",
        "server/work.py",
        "if num_bytes > limits.max_bad_words:",
        "if False:",
        f"{_LIMITS}::test_what_costs_too_much_is_refused",
    ),
    Fault(
        "each load has a thread of its own",
        "server/models.py",
        "Worker(self._makers[name], thread=self._thread)",
        "Worker(self._makers[name])",
        f"{_LIMITS}::test_loads_leave_no_threads",
    ),
    Fault(
        "a grammar's time has no limit",
        "sampling/grammar.py",
        "if self._left <= 0 and",
        "if False and",
        f"{_WORK}::test_a_grammar_that_takes_too_long_in_a_round_ends_and_no_other",
    ),
    Fault(
        "a dear grammar looks along whole drafts",
        "sampling/constraints.py",
        "if may_cut and self._grammar is not None and",
        "if False and self._grammar is not None and",
        f"{_WORK}::test_a_dear_grammar_cuts_its_drafts_before_it_ends",
    ),
    Fault(
        "a language without texts is not found before the answer",
        "sampling/grammar.py",
        '        if self._matcher.is_error():\n            raise GrammarError(f"The grammar cannot',
        '        if False:\n            raise GrammarError(f"The grammar cannot',
        f"{_WORK}::test_a_language_without_texts_is_an_error_of_the_request",
    ),
    Fault(
        "masks of forbidden words are kept for ever",
        "sampling/bad_words.py",
        "if len(self._masks) > _MASKS_KEPT:",
        "if False:",
        f"{_WORK}::test_what_words_take_is_bounded_by_their_bytes",
    ),
    Fault(
        "forbidden words that are shorter ends of the text are forgotten",
        "sampling/bad_words.py",
        "            at = self._links[at]",
        "            at = START",
        f"{_WORK}::test_tokens_are_forbidden_as_by_looking_at_the_whole_text",
    ),
    Fault(
        "rows go to whoever came first",
        "engine/schedule.py",
        "key=lambda r: (places.get(r.client, 0), r.number)",
        "key=lambda r: r.number",
        f"{_SHARES}::test_many_answers_of_one_client_do_not_hold_up_another",
    ),
    Fault(
        "no row makes room",
        "engine/schedule.py",
        "if most <= places.get(client, 0) + 1:",
        "if True:",
        f"{_SHARES}::test_many_answers_of_one_client_do_not_hold_up_another",
    ),
    Fault(
        "a parked row comes back with another one's state",
        "engine/engine.py",
        "self._cache.snapshot(row)",
        "self._cache.snapshot(row - 1)",
        f"{_SHARES}::test_many_answers_of_one_client_do_not_hold_up_another",
    ),
    Fault(
        "a full queue refuses everybody",
        "engine/schedule.py",
        "if most <= waiting[client] + 1:",
        "if True:",
        f"{_SHARES}::test_a_full_queue_takes_the_request_of_a_client_that_waits_with_fewer",
    ),
    Fault(
        "texts are cut anywhere",
        "loading/pieces.py",
        "if encoding.token_to_word(i) == encoding.token_to_word(i - 1):",
        "if False:",
        f"{_PIECES}::test_pieces_have_the_ids_of_the_whole",
    ),
    Fault(
        "texts are cut right at the end of a piece",
        "loading/pieces.py",
        "latest = end - start - self._margin",
        "latest = end - start",
        f"{_PIECES}::test_pieces_have_the_ids_of_the_whole",
    ),
    Fault(
        "a long text is counted to its end",
        "loading/tokenizer.py",
        "if most is not None and len(ids) + len(behind) >= most:",
        "if False:",
        f"{_PIECES}::test_a_long_text_ends_with_the_context",
    ),
    Fault(
        "tokenizing holds Python's lock",
        "loading/tokenizer.py",
        "self._inner.encode_batch([text], add_special_tokens=special)[0].ids",
        "self._inner.encode(text, add_special_tokens=special).ids",
        f"{_PIECES}::test_other_threads_run_meanwhile",
    ),
    Fault(
        "an ignored end token lifts what is forbidden behind it",
        "sampling/constraints.py",
        "ends=frozenset() if params.ignore_eos else self.vocabulary.eos_ids",
        "ends=self.vocabulary.eos_ids",
        f"{_POSITIONS}::test_ignored_end_tokens_inside_drafts_lift_nothing",
    ),
    Fault(
        "an ignored end token lifts what is forbidden behind it, seen in the masks",
        "sampling/constraints.py",
        "ends=frozenset() if params.ignore_eos else self.vocabulary.eos_ids",
        "ends=self.vocabulary.eos_ids",
        f"{_WORDS}::test_words_are_forbidden_behind_a_drafted_end_token_that_is_ignored",
    ),
    Fault(
        "a drafted token does not count for the position right behind it",
        "engine/sample_round.py",
        "for token in range(start + 1, place + 1)",
        "for token in range(start + 1, place)",
        f"{_POSITIONS}::test_penalties_at_drafted_positions_are_those_of_each_rows_own_text",
    ),
    Fault(
        "a drafted token counts for the positions of other rows",
        "engine/sample_round.py",
        "for token in range(start + 1, place + 1)",
        "for token in range(1, place + 1)",
        f"{_POSITIONS}::test_penalties_at_drafted_positions_are_those_of_each_rows_own_text",
    ),
    Fault(
        "penalties do not see drafted tokens",
        "sampling/sampler.py",
        "counts = counts if drafts is None else drafts.added_to(counts, logits.shape[0])",
        "counts = counts",
        f"{_POSITIONS}::test_a_penalized_text_and_its_accepted_drafts_are_exact",
    ),
    Fault(
        "penalties do not see drafted tokens of random requests",
        "sampling/sampler.py",
        "counts = counts if drafts is None else drafts.added_to(counts, logits.shape[0])",
        "counts = counts",
        f"{_RANDOM}::test_drafted_text_is_plain_text_in_float32[72]",
    ),
    Fault(
        "p_min goes by the token drawn",
        "drafters/model_based.py",
        "sureness = confidence(logits)",
        "sureness = mx.take_along_axis(mx.softmax(logits, axis=-1), chosen[:, None], axis=-1)[:, 0]",
        f"{_POSITIONS}::test_under_rejection_p_min_goes_by_the_likeliest_token",
    ),
    Fault(
        "the controller's cut looks ahead under rejection",
        "policy/auto.py",
        "lookahead = [not s.rejects or",
        "lookahead = [True or",
        f"{_POSITIONS}::test_under_rejection_the_controllers_cut_does_not_look_ahead",
    ),
    Fault(
        "a thinking budget is looked for at a round's first position only",
        "engine/sample_round.py",
        "not constraints.reaches(width + most)",
        "not constraints.reaches(1 + most)",
        f"{_POSITIONS}::test_a_thinking_budget_that_ends_inside_a_draft_is_exact",
    ),
    Fault(
        "tokens of a draft do not count as thinking",
        "sampling/constraints.py",
        "            state = self._step(state, token)\n        else:",
        "            state = state._replace(words=self._step(state, token).words)\n        else:",
        f"{_POSITIONS}::test_a_thinking_budget_that_ends_inside_a_draft_is_exact",
    ),
    Fault(
        "a drafter of one's own gets the engine's list",
        "drafters/guarded.py",
        "history=History(a.history), ",
        "",
        f"{_ROWS}[appends to the history, fixed]",
    ),
    Fault(
        "a drafter of one's own gets the row's sampler",
        "drafters/guarded.py",
        ", sampler=a.sampler.sealed()",
        "",
        f"{_ROWS}[sets the seed, fixed]",
    ),
    Fault(
        "a drafter of one's own gets the hiddens that others get",
        "drafters/guarded.py",
        "[(list(tokens), _copy(hidden)) for tokens, hidden in rounds]",
        "[(list(tokens), hidden) for tokens, hidden in rounds]",
        f"{_OWN}::test_what_a_drafter_does_with_its_copies_reaches_nobody",
    ),
    Fault(
        "a drafter of one's own gets the unread round",
        "drafters/guarded.py",
        "copies = Unread(*map(copied, unread))",
        "copies = unread",
        f"{_OWN}::test_assigning_to_an_unread_round_reaches_nobody",
    ),
    Fault(
        "errors that are no Exception get through",
        "drafters/guarded.py",
        "        except BaseException as error:",
        "        except Exception as error:",
        f"{_ROWS}[raises no Exception in propose, fixed]",
    ),
    Fault(
        "ids below 0 get through",
        "drafters/checked.py",
        "or not 0 <= token < vocab_size",
        "or not token < vocab_size",
        f"{_ROWS}[drafts negative ids on the device, fixed]",
    ),
    Fault(
        "confidences that are no probabilities get through",
        "drafters/checked.py",
        "if not all(math.isfinite(p) and 0.0 <= p <= 1.0 + _ROUNDING for p in given):",
        "if not given:",
        f"{_ROWS}[confidences that are NaN, auto]",
    ),
    Fault(
        "a draft's `backing` is not looked at",
        "drafters/checked.py",
        "if backing is not None and (not _is_whole(backing) or backing < 0):",
        "if False:",
        f"{_ROWS}[a backing below 0, auto]",
    ),
    Fault(
        "one row's wrong draft ends the drafter for all rows",
        "drafters/checked.py",
        "            wrong[place] = said",
        "            raise ValueError(said) from None\n            wrong[place] = said",
        f"{_ROWS}[drafts ids out of range, fixed]",
    ),
    Fault(
        "a model's device drafts may have any shape",
        "drafters/checked.py",
        "if tuple(tokens.shape) != (length,):",
        "if False:",
        f"{_OWN}::test_shape_and_type_of_a_models_device_drafts_are_checked_without_evaluating_them",
    ),
    Fault(
        "a drafter that fails must close",
        "drafters/chain.py",
        "            with suppress(Exception):  # it has ended for the row either way\n",
        "            if True:\n",
        f"{_OWN}::test_a_drafter_that_fails_and_cannot_be_closed_ends_for_its_rows_only",
    ),
    Fault(
        "settling is not guarded",
        "drafters/chain.py",
        "            self._finish(drafter, drafter.settle)",
        "            drafter.settle()",
        f"{_ROWS}[raises in settle, fixed]",
    ),
    Fault(
        "rows without a draft behind an unread round are not missed",
        "policy/fixed.py",
        "if 0 < len(won) < len(asks):",
        "if len(won) > len(asks):",
        f"{_OWN}::test_a_row_without_a_draft_behind_an_unread_round_waits_for_its_tokens",
    ),
    Fault(
        "what is drafted by mistake for one's own scores is submitted by what is said of it",
        "drafters/checked.py",
        "sure = None if sure is None else tops",
        "sure = sure",
        f"{_OWN}::test_p_min_goes_by_the_likeliest_token_of_the_scores_and_not_by_what_is_said_of_the_drawn",
    ),
    Fault(
        "the controller goes by confidences of drawn tokens",
        "policy/auto.py",
        "offer = offer._replace(confidences=None)",
        "offer = offer",
        f"{_OWN}::test_under_rejection_confidences_of_drawn_tokens_have_no_say_in_the_controllers_cut",
    ),
    Fault(
        "a drafter's part of a stored beginning may be taken for the target's",
        "engine/prefix_store.py",
        'TARGET = "the target"',
        'TARGET = "target"',
        f"{_OWN}::test_a_drafter_may_have_any_name_that_is_allowed",
    ),
    Fault(
        "a step may be called from within a step",
        "engine/engine.py",
        '        self._check_outside("step")\n',
        "",
        f"{_ROWS}[steps the engine, fixed]",
    ),
    Fault(
        "a row may leave in the middle of a step",
        "engine/engine.py",
        "                elif not self._is_stepping:\n                    self._retire()",
        "                else:\n                    self._retire()",
        f"{_OWN}::test_rows_may_be_cancelled_and_requests_queued_from_within_a_step",
    ),
    Fault(
        "one block of ids fewer than places is looked at",
        "sampling/truncate.py",
        "blocks[:, :num, None]",
        "blocks[:, : max(1, num - 1), None]",
        f"{_TRUNCATE}::test_the_likeliest_are_those_of_a_sort",
    ),
    Fault(
        "ids behind the last whole block are not looked at",
        "sampling/truncate.py",
        "    if rest:\n",
        "    if rest < 0:\n",
        f"{_TRUNCATE}::test_the_likeliest_are_those_of_a_sort",
    ),
    Fault(
        "both zeros are different scores",
        "sampling/truncate.py",
        "mx.where(x == 0, 0.0, x).view(mx.int32)",
        "x.view(mx.int32)",
        f"{_TRUNCATE}::test_the_likeliest_are_those_of_a_sort",
    ),
    Fault(
        "top-p counts a token's own mass",
        "sampling/truncate.py",
        "sums - masses < _limit",
        "sums < _limit",
        f"{_TRUNCATE}::test_what_stays_is_what_a_sort_leaves",
    ),
    Fault(
        "a share near nothing leaves nothing",
        "sampling/truncate.py",
        "max(1, round(share * one))",
        "round(share * one)",
        f"{_TRUNCATE}::test_what_stays_is_what_a_sort_leaves",
    ),
    Fault(
        "the second digit of a score is not looked at",
        "sampling/truncate.py",
        "floor = first << _DIGIT | low",
        "floor = first << _DIGIT",
        f"{_TRUNCATE}::test_counting_tells_neighbouring_floats_apart",
    ),
    Fault(
        "the mass of higher digits is forgotten",
        "sampling/truncate.py",
        "need - above",
        "need",
        f"{_TRUNCATE}::test_counting_tells_neighbouring_floats_apart",
    ),
    Fault(
        "a block of positions is sampled with the noise of the first one",
        "sampling/sampler.py",
        "                positions_of(positions, some),\n",
        "                positions_of(positions, slice(0, some.stop - some.start)),\n",
        f"{_BLOCKWISE}::test_blocks_give_the_tokens_of_one_block",
    ),
    Fault(
        "what was sampled and what was rejected stay in the order in which they were decided",
        "engine/sample_round.py",
        "mx.concatenate(parts)[mx.array(np.argsort(order).astype(np.int32))]",
        "mx.concatenate(parts)",
        f"{_BLOCKWISE}::test_rows_of_both_rules_in_one_round_take_what_each_takes_alone",
    ),
    Fault(
        "penalties are not counted beside what is drawn",
        "sampling/sampler.py",
        "_DRAWN + max(processed, beside",
        "max(processed, _DRAWN + beside",
        f"{_BLOCKWISE}::test_17_positions_of_248k_words_hold_at_most_three_times_their_logits[bfloat16]",
    ),
    Fault(
        "a block's drafts are counted at the places of the whole",
        "sampling/sampler.py",
        "self._places[inside] - some.start",
        "np.minimum(self._places[inside], some.stop - some.start - 1)",
        f"{_BLOCKWISE}::test_blocks_give_the_tokens_of_one_block",
    ),
    Fault(
        "blocks are not waited for",
        "sampling/blocks.py",
        "        device.finish(*parts[-1:])\n",
        "",
        f"{_BLOCKWISE}::test_17_positions_of_248k_words_hold_at_most_three_times_their_logits[bfloat16]",
    ),
    Fault(
        "of equal digits' masses the last one counts alone",
        "sampling/truncate.py",
        "    _, (sums,) = mx.vjp(lambda x: mx.take_along_axis(x, places, axis=1), [nothing], [numbers])\n    return sums\n",
        "    return mx.put_along_axis(nothing, places, numbers, axis=1)\n",
        f"{_TRUNCATE}::test_counting_finds_the_floor_of_a_sort",
    ),
    Fault(
        "top-k without top-p lets ties at the last place go",
        "sampling/sampler.py",
        "mx.where(tempered < floor, -mx.inf, tempered)",
        "mx.where(tempered <= floor, -mx.inf, tempered)",
        f"{_TRUNCATE}::test_equal_scores_of_any_number_stay_together",
    ),
    Fault(
        "the budget is looked at when the engine is made",
        "engine/load.py",
        "bytes_of(*modules) + sum(",
        "0 * bytes_of(*modules) + sum(",
        f"{_LOAD}::test_a_budget_below_the_weights_is_refused_before_they_are_read",
    ),
    Fault(
        "scratch is for the longest context of all",
        "engine/memory.py",
        "min(longest, self._model.max_context)",
        "self._model.max_context",
        f"{_MEMORY}::test_scratch_is_claimed_for_the_contexts_that_are_here",
    ),
    Fault(
        "tokens that were not read count into the speed of reading",
        "engine/stats.py",
        "self.num_read / self.prefill_seconds",
        "(self.num_prompt - self.num_cached) / self.prefill_seconds",
        f"{_MEMORY}::test_a_prompt_that_is_cancelled_counts_what_was_read_of_it",
    ),
    Fault(
        "a count that rounds to a thousand keeps its unit",
        "cli/inspect.py",
        "while value >= 999.5",
        "while value >= 1000",
        "tests/checkpoints/test_inspect.py::test_counts_of_parameters_have_three_digits_and_no_exponent",
    ),
    Fault(
        "weights are unpacked into the last of the memory",
        "platform/device.py",
        "nbytes <= _FREE_SHARE * free",
        "nbytes <= free",
        f"{_PACKED}::test_free_memory_decides_whether_weights_are_unpacked",
    ),
    Fault(
        "a text is proposed the tokens of another",
        "drafters/proposals.py",
        "mx.where(may, own, -mx.inf)",
        "own",
        f"{_PROPOSALS}::test_no_text_is_proposed_anothers_tokens",
    ),
    Fault(
        "a text brings no tokens of its own",
        "drafters/proposals.py",
        "text.own[token] = None",
        "changed = False",
        f"{_PROPOSALS}::test_ids_are_the_lists_and_the_texts_own",
    ),
    Fault(
        "places among the rows are taken for ids",
        "sampling/sampler.py",
        "return places.astype(mx.int32) if ids is None else ids[places]",
        "return places.astype(mx.int32)",
        f"{_PROPOSALS}::test_the_first_draft_is_the_best_of_what_may_be_proposed[mtp]",
    ),
    Fault(
        "tokens that cannot be drafted have a probability",
        "sampling/sampler.py",
        "everything = mx.full((logits.shape[0], vocab_size), -mx.inf, logits.dtype)",
        "everything = mx.full((logits.shape[0], vocab_size), -9.0, logits.dtype)",
        f"{_PROPOSALS}::test_drawing_from_some_tokens_is_drawing_from_all_where_others_are_impossible[sampled-shared]",
    ),
    Fault(
        "noise goes by the place among the rows",
        "sampling/sampler.py",
        "noise = noise[:, ids]",
        "noise = noise[:, : ids.size]",
        f"{_PROPOSALS}::test_shared_noise_is_that_of_the_whole_vocabulary",
    ),
    Fault(
        "penalties and bias go by the place among the rows",
        "sampling/sampler.py",
        "return values if ids is None else values[ids]",
        "return values if ids is None else values[: ids.size]",
        f"{_PROPOSALS}::test_drawing_from_some_tokens_is_drawing_from_all_where_others_are_impossible[penalized-shared]",
    ),
    Fault(
        "the first rows of a packed head are taken for those asked for",
        "models/layers.py",
        "parts = head.weight[ids],",
        "parts = head.weight[: len(ids)],",
        "tests/models/test_head_rows.py::test_packed_rows_are_the_very_ones[4bit]",
    ),
    Fault(
        "rows of floats stay floats beside a quantized model",
        "models/head_rows.py",
        'if self._bits is not None and "scales" not in part and part.weight.shape[1] % GROUP_SIZE == 0:',
        "if False:",
        "tests/models/test_head_rows.py::test_only_floats_are_quantized[bfloat16]",
    ),
    Fault(
        "the memory's account leaves rows of a head out",
        "drafters/mtp.py",
        "return bytes_of(self._head) + (0 if self.reduced is None else self.reduced.weight_bytes)",
        "return bytes_of(self._head)",
        "tests/checkpoints/test_proposal_rows.py::test_loading_takes_rows_and_says_so",
    ),
    Fault(
        "special tokens are left to chance",
        "loading/row_lists.py",
        "np.asarray(added, np.int64), ids,",
        "np.asarray(added[:0], np.int64), ids,",
        "tests/loading/test_row_lists.py::test_added_tokens_are_listed_wherever_their_ids_lie",
    ),
    Fault(
        "a round need not be paid for beforehand",
        "policy/controller.py",
        "return balance([r.account for r in rows]) * curve.seconds(len(rows))",
        "return 1e9",
        f"{_ACCOUNT}[M3 Max-1-warm]",
    ),
    Fault(
        "what drafting takes need not be paid for beforehand",
        "policy/controller.py",
        "            return cost.seconds(depth, queued)\n",
        "            return 0.0\n",
        f"{_ACCOUNT}[flat-1-warm]",
    ),
    Fault(
        "an account does not pay for what was lost",
        "policy/account.py",
        "self._earn * rounds + gained",
        "self._earn * rounds + max(gained, 0.0)",
        f"{_ACCOUNT}[M3 Max-1-cold]",
    ),
    Fault(
        "an account has no cap",
        "policy/account.py",
        "self.balance = min(self.balance + self._earn * rounds + gained, self._cap)",
        "self.balance += self._earn * rounds + gained",
        f"{_ACCOUNT}[flat-1-warm]",
    ),
    Fault(
        "streams are of the token itself, not of the one before",
        "engine/prefill.py",
        "before = mx.concatenate([self.carry.astype(hidden.dtype), hidden[:-1]])",
        "before = hidden",
        f"{_SHOWN}::test_rows_are_those_of_layer_after_layer[hybrid-float32-tape]",
    ),
    Fault(
        "a drafter is given the streams of its layers in another order",
        "drafters/streams.py",
        "[1 + self.layers.index(i) for i in needs.layers]",
        "[1 + self.layers.index(i) for i in sorted(needs.layers)]",
        f"{_SHOWN}::test_rows_are_those_of_layer_after_layer[hybrid-float32-tape]",
    ),
    Fault(
        "layers are computed for rows that do not ask",
        "engine/hiddens.py",
        "(are_kept or d.name in spec.drafters)",
        "True",
        f"{_SHOWN}::test_layers_are_computed_for_those_who_ask_only",
    ),
    Fault(
        "streams of rejected rows of an unread round are kept",
        "drafters/mtp.py",
        "        cache.commit(num)\n        before =",
        "        cache.commit(mx.full(num.shape, unread.width, mx.int32))\n        before =",
        f"{_EAGLE}::test_what_the_engine_feeds_it[3-True]",
    ),
    Fault(
        "what an EAGLE-3 layer gives is normed before it is fed back",
        "models/eagle3.py",
        "return self._normed(x) if self._config.norm_output else x",
        "return self._normed(x)",
        f"{_EAGLE}::test_logits_are_those_of_the_algorithm[SafeAILab]",
    ),
    Fault(
        "rows of a reduced head are taken for the target's tokens",
        "drafters/eagle3.py",
        "return self._eagle.ids",
        "return None",
        f"{_EAGLE}::test_drafts_are_of_its_own_vocabulary_and_rejection_knows_them_in_the_whole_one",
    ),
    Fault(
        "a block behind an unread round sees cells of rejected tokens",
        "models/dflash.py",
        "    if cache.exact is None:\n        return None\n    length",
        "    return None\n    length",
        f"{_OVERLAPPED}[DFlash]",
    ),
    Fault(
        "a block behind an unread round begins with an old token",
        "drafters/dflash.py",
        "            newest = unread.newest\n",
        "",
        f"{_OVERLAPPED}[DSpark]",
    ),
    Fault(
        "a list of layers that counts those before names the layer behind",
        "models/eagle3.py",
        "i if ids[0] == 1 else i - 1 for i in ids",
        "i for i in ids",
        f"{_EAGLE}::test_layer_lists_of_both_kinds_name_the_same_layers",
    ),
    Fault(
        "pieces are renamed before they are on the disk",
        "engine/prefix_disk/folder.py",
        "            file.flush()\n            self.sync(file.fileno())\n",
        "            file.flush()\n",
        f"{_DISK}::test_a_piece_is_synced_before_it_has_its_name",
    ),
    Fault(
        "room is made behind a write",
        "engine/prefix_disk/folder.py",
        "            self._drop(label.key)\n            self._make_room(size)\n",
        "            self._drop(label.key)\n",
        f"{_DISK}::test_the_least_recently_used_text_goes_first",
    ),
    Fault(
        "the limit does not hold at the start",
        "engine/prefix_disk/folder.py",
        "        with self._locked():\n            self._make_room(0)\n",
        "        with self._locked():\n            pass\n",
        f"{_DISK}::test_a_smaller_limit_holds_from_the_start",
    ),
    Fault(
        "checksums are not compared",
        "engine/prefix_disk/piece.py",
        "    if _digest(unsigned, [body]) != checksum:",
        "    if False:",
        f"{_DISK}::test_a_flipped_bit_is_never_served[1]",
    ),
    Fault(
        "what another process has written is not seen",
        "engine/prefix_disk/folder.py",
        "is_stale, self._seen = count != self._seen, count",
        "is_stale, self._seen = self._seen < 0, count",
        f"{_DISK}::test_two_processes_share_a_folder",
    ),
    Fault(
        "an end follows a piece that could not be written",
        "engine/prefix_disk/disk.py",
        "if self._failures != self.stats.num_failed:",
        "if False:",
        f"{_DISK}::test_no_end_follows_a_piece_that_could_not_be_written",
    ),
    Fault(
        "a reading that goes wrong never ends",
        "engine/prefix_disk/mover.py",
        "        except Exception as error:\n            self._miss(reading)\n",
        "        except ZeroDivisionError as error:\n            self._miss(reading)\n",
        f"{_DISK}::test_whatever_goes_wrong_while_a_piece_is_read_is_a_miss",
    ),
    Fault(
        "a state is used behind which a drafter could not begin",
        "engine/prefix_disk/plan.py",
        "        if sources is None:\n            return None\n        keys",
        "        sources = sources or []\n        keys",
        f"{_DISK}::test_another_signature_finds_nothing",
    ),
    Fault(
        "weights are not part of a signature",
        "engine/prefix_disk/signature.py",
        "        fingerprint(model),\n",
        "",
        f"{_RESTART}::test_other_weights_find_nothing",
    ),
    Fault(
        "the drafters' states are not written",
        "engine/prefix_disk/open.py",
        "    roots |= {d.name: root for d in drafters if (root := of_drafter(target, d)) is not None}\n",
        "",
        f"{_RESTART}::test_states_of_every_drafter_that_has_some_are_written",
    ),
    Fault(
        "rows wait while a prompt is read from the disk",
        "engine/prefill.py",
        "                return False\n            self._fetch = None\n",
        "                fetch.wait(60)\n                continue\n            self._fetch = None\n",
        f"{_RESTART}::test_rows_go_on_while_a_prompt_waits_for_the_disk",
    ),
    Fault(
        "memory that reading takes is not reckoned",
        "engine/prefix.py",
        "            self._coming += fetch.nbytes\n",
        "",
        f"{_RESTART}::test_what_is_read_has_room_in_the_budget",
    ),
    Fault(
        "another tower's states are served from the disk",
        "engine/prefix_disk/signature.py",
        "        None if tower is None else fingerprint(tower),\n",
        "",
        f"{_RESTART}::test_images_continue_behind_a_restart_with_the_same_tower_only",
    ),
    Fault(
        "another tower of a draft model is served the states of the first",
        "drafters/draft_model.py",
        "(self._model,) if self._vision is None else (self._model, self._vision.tower)",
        "(self._model,)",
        f"{_RESTART}::test_images_continue_behind_a_restart_with_the_same_tower_only",
    ),
    Fault(
        "reading an image takes no memory",
        "engine/memory.py",
        "        return self._tower.scratch_bytes(most) if most else 0\n",
        "        return 0\n",
        f"{_MEMORY}::test_reading_an_image_is_counted",
    ),
    Fault(
        "text behind an image has the positions of its indices",
        "models/image_rows.py",
        "        return self._shifts[num - 1] if num else 0\n",
        "        return 0\n",
        f"{_FIELD}::test_decoding_goes_on_at_the_shifted_position",
    ),
    Fault(
        "an image's tokens are known by their number alone",
        "models/image_rows.py",
        "image_keys(prepared.digest, len(places))",
        'image_keys(b"", len(places))',
        f"{_FIELD}::test_another_image_of_one_size_is_another_prompt",
    ),
    Fault(
        "the MTP head is fed the rows of the cell's own token",
        "drafters/model_based.py",
        "image_input(list(pieces), skips=self.skips, axes=self.turns_by_axes)",
        "image_input(list(pieces), axes=self.turns_by_axes)",
        "tests/engine/test_images_drafted.py::test_the_head_is_fed_the_rows_and_positions_of_images[512]",
    ),
    Fault(
        "all images of a prompt are read in one step",
        "engine/prefill.py",
        "                return True\n        return False\n\n    def _turn(self)",
        "        return False\n\n    def _turn(self)",
        "tests/engine/test_images.py::test_rows_that_decode_wait_for_one_image_at_most",
    ),
)


@pytest.fixture(scope="module")
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package and its tests; all else is linked. Without faults, the tests of those that will be planted pass in it."""
    made = tmp_path_factory.mktemp("planted")
    for item in ROOT.iterdir():
        if item.name in ("mlxspec", "tests"):
            shutil.copytree(item, made / item.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not item.name.startswith("."):
            (made / item.name).symlink_to(item)
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and hasattr(i, "callspec")]
    planted = [i.callspec.params["fault"] for i in items if i.path == Path(__file__)]
    unchanged = _run(made, *dict.fromkeys(f.test for f in planted))
    assert unchanged.returncode == 0, unchanged.stdout[-2000:] + unchanged.stderr[-2000:]
    yield made
    shutil.rmtree(made)


def _run(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    # bytecode goes by seconds, and a file may change twice within one
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)


def test_every_fault_can_be_planted() -> None:
    """Code that has moved leaves no entry behind that plants nothing."""
    for fault in FAULTS:
        source = (ROOT / "mlxspec" / fault.file).read_text(encoding="utf-8")
        assert source.count(fault.old) == 1, fault.name


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_planted_fault_is_found(copy: Path, fault: Fault) -> None:
    path = copy / "mlxspec" / fault.file
    right = path.read_text(encoding="utf-8")
    assert right.count(fault.old) == 1
    path.write_text(right.replace(fault.old, fault.new), encoding="utf-8")
    try:
        done = _run(copy, fault.test)
    finally:
        path.write_text(right, encoding="utf-8")
    # 1: tests ran and failed; 2 to 5 would be an error of the run itself
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"FAILED {fault.test}" in done.stdout
