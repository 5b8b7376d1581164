"""Where the trainer reduces per-token values to a loss, scales it, and aggregates the metrics."""

from __future__ import annotations

from typing import Any, ClassVar

import libcst as cst
from libcst import matchers as m

from miles.drop_in import edits
from miles.drop_in.seams.base import ADAPTER, AdapterSeam, assignment, attribute, called, line

_PER_TOKEN = attribute("args", "calculate_per_token_loss")


class _ReducerChoice(AdapterSeam):
    """A default reducer, which sums tokens where `args.calculate_per_token_loss` says so."""

    purpose = "keep metrics of the policy loss sample means under token_mean"
    by_hand = f"pass {ADAPTER}.sums_tokens(args) in place of args.calculate_per_token_loss"
    inside: ClassVar[str]

    def find(self, module: cst.Module) -> Any:
        """Return the argument that chooses."""
        function = self.function(module, self.inside)
        calls = edits.find_all(function, called("get_sum_of_sample_mean"))
        for call in calls:
            self.refuse_calls(call, "sums_tokens")
        found = [argument for call in calls for argument in call.args if m.matches(argument.value, _PER_TOKEN)]
        return self.only(found, f"get_sum_of_sample_mean(..., args.calculate_per_token_loss, ...) in {self.inside}")

    def edit(self, module: cst.Module) -> cst.Module:
        """Let the adapter choose."""
        value = self.find(module).value
        choice = edits.parse_expression(module, f"{ADAPTER}.sums_tokens({module.code_for_node(value.value)})")
        return self.with_import(edits.replace(module, value, choice))


class DefaultReducer(_ReducerChoice):
    """The reducer that every loss function gets."""

    name = "default-reducer"
    looked_for = "get_sum_of_sample_mean(..., args.calculate_per_token_loss, ...) in loss_function"
    inside = "loss_function"


class CorrectedReducer(_ReducerChoice):
    """The reducer over the masks that an importance-sampling correction left."""

    name = "corrected-reducer"
    looked_for = "get_sum_of_sample_mean(..., args.calculate_per_token_loss, ...) in policy_loss_function"
    inside = "policy_loss_function"


class PgLossReducer(AdapterSeam):
    """Chooses the reducer of the policy-gradient term, where no custom one is asked for."""

    name = "pg-loss-reducer"
    purpose = "choose the reducer of the policy-gradient term by mode; a custom reducer still comes first"
    looked_for = (
        "if ...custom_pg_loss_reducer_function_path...: pg_loss_masks = ...; else: pg_loss_reducer = "
        "sum_of_sample_mean, in policy_loss_function"
    )
    by_hand = (
        "where no custom reducer is asked for, with the pg_loss_masks that one would get: pg_loss_reducer = "
        f"{ADAPTER}.get_pg_loss_reducer(args, batch, pg_loss_masks, sum_of_sample_mean, slice_log_prob_with_cp), the "
        "last imported beside get_sum_of_sample_mean"
    )

    def find(self, module: cst.Module) -> Any:
        """Return the statement that takes the default reducer."""
        choice = self._choice(module)
        self.refuse_calls(choice, "get_pg_loss_reducer")
        default = assignment(m.Name("pg_loss_reducer"), m.Name("sum_of_sample_mean"))
        found = [] if choice.orelse is None else edits.find_all(choice.orelse, default)
        return self.only(found, "pg_loss_reducer = sum_of_sample_mean in its else")

    def edit(self, module: cst.Module) -> cst.Module:
        """Take the mode's, over the same masks that a custom reducer would get."""
        statement = self.find(module)
        found = edits.find_all(self._choice(module).body, assignment(m.Name("pg_loss_masks")))
        masks = self.only(found, "assignment to pg_loss_masks").with_changes(leading_lines=())
        start = f"pg_loss_reducer = {ADAPTER}.get_pg_loss_reducer("
        arguments = ["args", "batch", "pg_loss_masks", "sum_of_sample_mean", "slice_log_prob_with_cp"]
        code = edits.call_code(start, arguments, depth=edits.depth(module, statement))
        self.require_names(self.function(module, "policy_loss_function"), *arguments[:-1])
        package = edits.source_of(module, "get_sum_of_sample_mean")
        if package is None:
            raise self.error("there is no import of get_sum_of_sample_mean, beside which slice_log_prob_with_cp is")
        edited = edits.replace_statement(module, statement, module.code_for_node(masks).strip(), code)
        return self.with_import(edits.import_from(edited, package, arguments[-1]))

    def _choice(self, module: cst.Module) -> cst.If:
        function = self.function(module, "policy_loss_function")
        is_option = m.Attribute(attr=m.Name("custom_pg_loss_reducer_function_path")) | m.SimpleString(
            m.MatchIfTrue(lambda value: value.strip("'\"") == "custom_pg_loss_reducer_function_path")
        )
        found = [node for node in edits.find_all(function, m.If()) if edits.find_all(node.test, is_option)]
        return self.only(found, "if ...custom_pg_loss_reducer_function_path... in policy_loss_function")


class ActiveTokens(AdapterSeam):
    """Counts active tokens, without one for each fully masked row."""

    name = "active-tokens"
    purpose = "count active tokens without phantom ones under token_mean"
    looked_for = "num_tokens = sum(...), in loss_function"
    by_hand = (
        f'after num_tokens is counted: num_tokens = {ADAPTER}.count_active_tokens(args, batch["loss_masks"], '
        "num_tokens)"
    )

    def find(self, module: cst.Module) -> Any:
        """Return the statement that counts."""
        function = self.function(module, "loss_function")
        self.refuse_calls(function, "count_active_tokens")
        found = edits.find_all(function, assignment(m.Name("num_tokens"), m.Call(func=m.Name("sum"))))
        return self.only(found, "num_tokens = sum(...) in loss_function")

    def edit(self, module: cst.Module) -> cst.Module:
        """Count again after it."""
        code = f'num_tokens = {ADAPTER}.count_active_tokens(args, batch["loss_masks"], num_tokens)'
        return self.write_after(module, self.find(module), code)


class TokenDivisor(AdapterSeam):
    """Divides by the step's tokens on the backend that does not."""

    name = "token-divisor"
    purpose = "divide the FSDP loss by the active tokens of the step under token_mean"
    looked_for = "the return of loss_function, with parameters loss and apply_megatron_loss_scaling in it"
    by_hand = (
        f"before loss_function returns, if not apply_megatron_loss_scaling: loss = {ADAPTER}.divide_by_step_tokens("
        "args, batch, loss, parallel_state.intra_dp.size)"
    )

    def find(self, module: cst.Module) -> Any:
        """Return the return statement."""
        function = self.function(module, "loss_function")
        self.refuse_calls(function, "divide_by_step_tokens")
        self.only(edits.find_all(function.params, m.Param(m.Name("apply_megatron_loss_scaling"))), "such a parameter")
        returned = m.Return(m.Tuple([m.Element(m.Name("loss")), m.ZeroOrMore()]))
        return self.only(edits.find_all(function, line(returned)), "return of (loss, ...) in loss_function")

    def edit(self, module: cst.Module) -> cst.Module:
        """Divide before it."""
        call = f"{ADAPTER}.divide_by_step_tokens(args, batch, loss, parallel_state.intra_dp.size)"
        code = f"if not apply_megatron_loss_scaling:\n    loss = {call}"
        return self.write_before(module, self.find(module), code)


class KeyNormalizers(AdapterSeam):
    """Puts a normalizer for each metric into the log dictionary.

    Attributes:
        num_samples: code of the samples that a micro-batch counts, and of how many equal shares of them it has one.
    """

    name = "key-normalizers"
    purpose = "give each metric its own normalizer under token_mean"
    looked_for = 'the dict {"keys": list(LOG.keys()), "values": ...} that loss_function returns'

    def __init__(self, path: str, package: str, num_samples: tuple[str, ...]) -> None:
        super().__init__(path, package)
        self.num_samples = num_samples  # counted in another way in each host
        arguments = ", ".join(["args", "log", "num_tokens", *num_samples])
        self.by_hand = f'add **{ADAPTER}.normalize_by_key({arguments}) after "values", with the metrics for log'

    def find(self, module: cst.Module) -> Any:
        """Return the dict."""
        function = self.function(module, "loss_function")
        self.refuse_calls(function, "normalize_by_key")
        dicts = [node for line_ in edits.find_all(function, m.Return()) for node in edits.find_all(line_, m.Dict())]
        found = [node for node in dicts if {"keys", "values"} <= _keys(node)]
        return self.only(found, 'dict with "keys" and "values" in what loss_function returns')

    def edit(self, module: cst.Module) -> cst.Module:
        """Let the adapter replace the values."""
        literal = self.find(module)
        metrics = self.only(edits.find_all(literal, m.Call(func=m.Attribute(m.Name(), m.Name("keys")))), "LOG.keys()")
        arguments = ["args", module.code_for_node(metrics.func.value), "num_tokens", *self.num_samples]
        start = f"**{ADAPTER}.normalize_by_key("
        self.require_names(self.function(module, "loss_function"), *arguments)
        code = edits.call_code(start, arguments, depth=edits.depth(module, literal) + 2, width=118)
        return self.with_import(edits.add_entries(module, literal, code))


def _keys(literal: cst.Dict) -> set[str]:
    entries = edits.find_all(literal, m.DictElement(key=m.SimpleString()))
    return {entry.key.evaluated_value for entry in entries}


class MetricAggregation(AdapterSeam):
    """Aggregates metrics that have normalizers of their own."""

    name = "metric-aggregation"
    purpose = "divide each metric by its own normalizer where the log dictionaries carry them"
    looked_for = (
        'keys = losses_reduced[0]["keys"] and an all_reduce over GROUP, in aggregate_train_losses or '
        "reduce_train_step_metrics"
    )
    by_hand = (
        f"first in the aggregation: metrics = {ADAPTER}.aggregate_by_key(losses_reduced, context-parallel size, "
        "groups); return them unless they are None"
    )

    def find(self, module: cst.Module) -> Any:
        """Return the statement that reads the keys."""
        function = self._function(module)
        self.refuse_calls(function, "aggregate_by_key")
        first = m.Subscript(value=m.Subscript(value=m.Name("losses_reduced")))
        return self.only(
            edits.find_all(function, assignment(m.Name("keys"), first)), 'keys = losses_reduced[0]["keys"]'
        )

    def edit(self, module: cst.Module) -> cst.Module:
        """Let the adapter aggregate before it."""
        statement, function = self.find(module), self._function(module)
        groups = self._groups(module, function)
        cp_size = (
            "cp_size" if edits.find_all(function.params, m.Param(m.Name("cp_size"))) else "parallel_state.cp.size"
        )
        start = f"metrics = {ADAPTER}.aggregate_by_key("
        code = edits.call_code(start, ["losses_reduced", cp_size, groups], depth=edits.depth(module, statement))
        return self.write_before(module, statement, code, "if metrics is not None:\n    return metrics")

    def _function(self, module: cst.Module) -> cst.FunctionDef:
        return self.function(module, "aggregate_train_losses", "reduce_train_step_metrics")

    def _groups(self, module: cst.Module, function: cst.FunctionDef) -> str:
        """Return code of the groups over which the function sums: of a loop, or the one of an argument."""
        call = self.only(edits.find_all(function, called("all_reduce")), "call of all_reduce in the aggregation")
        loops = [loop for loop in edits.find_all(function, m.For()) if edits.contains(loop, call)]
        if loops:
            return module.code_for_node(loops[0].iter)
        found = [
            argument for argument in call.args if argument.keyword is not None and argument.keyword.value == "group"
        ]
        return f"[{module.code_for_node(self.only(found, 'group=... in the all_reduce').value)}]"
