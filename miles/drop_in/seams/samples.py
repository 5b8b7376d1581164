"""Where the trainer turns samples into train data, and train data into one shard for each data-parallel rank."""

from __future__ import annotations

from typing import Any, ClassVar

import libcst as cst
from libcst import matchers as m

from miles.drop_in import edits
from miles.drop_in.seams.base import ADAPTER, AdapterSeam, assignment, attribute, called, subscript

COLUMNS = ("prompt_group_indices", "prompt_mask_sums")


def args_of(module: cst.Module, node: cst.CSTNode) -> str:
    """Return how the function around `node` names the options: a parameter, or an attribute of `self`."""
    parameters = edits.enclosing_function(module, node).params.params
    return "args" if any(parameter.name.value == "args" for parameter in parameters) else "self.args"


class PromptColumns(AdapterSeam):
    """Adds the prompt groups and their token counts to the train data."""

    name = "prompt-columns"
    purpose = "add prompt_group_indices and prompt_mask_sums to the train data under prompt_mean"
    looked_for = 'train_data["loss_masks"] = loss_masks, in a function with samples'
    by_hand = f"after the loss masks are known: train_data.update({ADAPTER}.prompt_columns(args, samples, train_data))"

    def find(self, module: cst.Module) -> Any:
        """Return the statement that stores the loss masks."""
        self.refuse_calls(module, "prompt_columns")
        found = edits.find_all(module, assignment(subscript("train_data", "loss_masks")))
        return self.only(found, 'assignment to train_data["loss_masks"]')

    def edit(self, module: cst.Module) -> cst.Module:
        """Add the columns after it."""
        statement = self.find(module)
        code = f"train_data.update({ADAPTER}.prompt_columns({args_of(module, statement)}, samples, train_data))"
        return self.write_after(module, statement, code)


class ShardColumns(AdapterSeam):
    """Carries the new columns with the rows of a shard."""

    name = "shard-columns"
    purpose = "carry the new columns with each rank's rows"
    looked_for = 'for key in [..., "rewards", ..., "loss_masks", ...]: where a rank\'s shard is packaged'
    by_hand = f"add {' and '.join(COLUMNS)} to the columns that are reduced to a rank's rows"

    def find(self, module: cst.Module) -> Any:
        """Return the list of columns."""
        lists = [node.iter for node in edits.find_all(module, m.For(iter=m.List()))]
        found = [node for node in lists if {"rewards", "loss_masks"} <= set(edits.string_values(node))]
        columns = self.only(found, "loop over a list with rewards and loss_masks")
        self.refuse_strings(edits.string_values(columns), COLUMNS)
        return columns

    def edit(self, module: cst.Module) -> cst.Module:
        """Add the columns to it."""
        return edits.add_strings(module, self.find(module), *COLUMNS, after="loss_masks")


class StoreSchema(AdapterSeam):
    """Describes the new columns to the object store."""

    name = "store-schema"
    purpose = "describe the new columns to the object store"
    looked_for = "the dict ROLLOUT_DATA_VALUE_SPEC, with an entry for sample_indices"
    by_hand = f"describe {' and '.join(COLUMNS)} as sample_indices is described"

    def find(self, module: cst.Module) -> Any:
        """Return the dict."""
        name = m.Name("ROLLOUT_DATA_VALUE_SPEC")
        is_set = m.Assign(targets=[m.AssignTarget(name)], value=m.Dict()) | m.AnnAssign(target=name, value=m.Dict())
        literal: cst.Dict = self.only(edits.find_all(module, is_set), "dict ROLLOUT_DATA_VALUE_SPEC").value
        self.refuse_strings(_keys(literal), COLUMNS)
        self.only([key for key in _keys(literal) if key == "sample_indices"], "entry for sample_indices in it")
        return literal

    def edit(self, module: cst.Module) -> cst.Module:
        """Describe the new columns as row numbers are described."""
        literal = self.find(module)
        index = _keys(literal).index("sample_indices")
        value = module.code_for_node(literal.elements[index].value)
        return edits.add_entries(module, literal, *(f'"{column}": {value}' for column in COLUMNS), index=index)


def _keys(literal: cst.Dict) -> list[str]:
    """Return the key of each entry; an empty string for what is no plain string."""
    return [getattr(getattr(entry, "key", None), "evaluated_value", "") for entry in literal.elements]


class WholeGroups(AdapterSeam):
    """Keeps prompt groups whole where rows are dealt to the ranks."""

    name = "whole-groups"
    purpose = "keep each prompt group on one rank and in one step under prompt_mean"
    looked_for = "if args.balance_data: partitions = ...; else: partitions = ..."
    by_hand = f"pass the ranks' rows through {ADAPTER}.keep_groups_whole(args, data, partitions)"

    def find(self, module: cst.Module) -> Any:
        """Return the `if` statement that makes the partitions."""
        self.refuse_calls(module, "keep_groups_whole")
        branches = edits.find_all(module, m.If(test=attribute("args", "balance_data"), orelse=m.Else()))
        makes = assignment(m.Name("partitions"))
        found = [node for node in branches if edits.find_all(node.body, makes) and edits.find_all(node.orelse, makes)]
        return self.only(found, "if args.balance_data that makes partitions in both branches")

    def edit(self, module: cst.Module) -> cst.Module:
        """Pass the partitions through the adapter."""
        statement = self.find(module)
        code = f"partitions = {ADAPTER}.keep_groups_whole({args_of(module, statement)}, data, partitions)"
        return self.write_after(module, statement, code)


class WholeGroupsInSchedule(AdapterSeam):
    """Keeps prompt groups whole where micro-batches are scheduled together with the ranks."""

    name = "whole-groups-in-schedule"
    purpose = "keep each prompt group on one rank in a schedule that is made on the rollout side"
    looked_for = "... = build_dp_schedule(...), in a function with data"
    by_hand = f"call {ADAPTER}.keep_groups_whole_in_schedule(build_dp_schedule, data) in place of build_dp_schedule"
    _new: ClassVar[str] = "build_schedule"

    def find(self, module: cst.Module) -> Any:
        """Return the statement that makes the schedule."""
        self.refuse_calls(module, "keep_groups_whole_in_schedule")
        found = edits.find_all(module, m.SimpleStatementLine(body=[m.Assign(value=called("build_dp_schedule"))]))
        return self.only(found, "assignment of build_dp_schedule(...)")

    def edit(self, module: cst.Module) -> cst.Module:
        """Call the adapter's schedule, which calls the trainer's."""
        statement = self.find(module)
        function = statement.body[0].value.func
        code = f"{self._new} = {ADAPTER}.keep_groups_whole_in_schedule({module.code_for_node(function)}, data)"
        renamed = statement.deep_replace(function, cst.Name(self._new)).with_changes(leading_lines=())
        first = edits.parse_statement(module, code).with_changes(leading_lines=statement.leading_lines)
        return self.with_import(edits.replace(module, statement, first, renamed))
