"""Ways to be wrong in targets/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "a head in memory of its own keeps its bits",
        "targets/modules.py",
        "weights[name].copy_(weights[same])",
        "pass",
        Tests("sources/test_tied.py", "tied_or_not"),
    ),
    Mutant(
        "a version is held though the head has other bits",
        "targets/modules.py",
        "if not all(has_bits(all_weights[name], weights[same]) for name, same in self._copies.items()):",
        "if not weights:",
        Tests("sources/test_tied.py", "part_of_what"),
    ),
    Mutant(
        "an engine's own head keeps its bits without a word",
        "targets/engine.py",
        "if any(self.tensors[live].data_ptr() not in memory for live in own):",
        "if not own:",
        Tests("sources/test_tied.py", "head_of_its_own"),
    ),
    Mutant(
        "a copy that nobody has verified is patched",
        "targets/checkpoint.py",
        "rest = _rest(digest, patches, self._path)",
        "rest = _rest(patches[0].base, patches, self._path)",
        Tests("hostile/test_odd_files.py", "what_was_verified"),
    ),
    Mutant(
        "digits are numbers that rounding leaves alone",
        "targets/pieces.py",
        "_SMALLEST = 2.0**-4",
        "_SMALLEST = 2.0**8",
        Tests("targets/test_numbering.py", "not_what_is_computed"),
    ),
    Mutant(
        "what was read as a number is still a copy",
        "targets/watching.py",
        "if not _TOLD.isdisjoint(func.tags):",
        "if False:",
        Tests("targets/test_first_load.py", "may_have_been_computed"),
    ),
    Mutant(
        "casts on the way lose nothing",
        "targets/watching.py",
        "if source.dtype != tensor.dtype and not all(_holds_all(source.dtype, self._dtypes[a.name]) for a in arrived):",
        "if False:",
        Tests("targets/test_watching.py", "casts_on_the_way"),
    ),
    Mutant(
        "what numbers show holds for all bits",
        "targets/engine_layout.py",
        "load_all(awkward)",
        "pass",
        Tests("targets/test_watching.py", "numbers_do_not_show"),
    ),
    Mutant(
        "what a load has written to is as before",
        "targets/first_load.py",
        "not (memory and memory.names) and has_bits(tensor, before)",
        "has_bits(tensor, before)",
        Tests("targets/test_first_load.py", "same_by_chance"),
    ),
    Mutant(
        "numbers that Python keeps do not count",
        "targets/model_copy.py",
        "return [*changed_names(self.digests, now.digests), *gone, *changed_values(self.values, now.values)]",
        "return [*changed_names(self.digests, now.digests), *gone]",
        Tests("integrations/test_sglang_learning.py", "beside_their_weights"),
    ),
    Mutant(
        "the last pass repeats the first mixed one",
        "targets/numbering.py",
        "return digit if last == 0 else most - digit",
        "return digit",
        Tests("targets/test_numbering.py", "one_group_is_read"),
    ),
    Mutant(
        "numbers come in opposite digits by chance alone",
        "targets/numbering.py",
        "return most - self.digit(number, turn - self.places)",
        "return self.digit(number, turn - self.places)",
        Tests("targets/test_numbering.py", "larger_of_two"),
    ),
    Mutant(
        "numbers are loaded for one tensor of a layer alone",
        "targets/engine_layout.py",
        "if layer_of(tensor.name) in layers]",
        "if tensor.name in unclear]",
        Tests("targets/test_numbering.py", "cannot_be_watched"),
    ),
    Mutant(
        "copies that were watched are believed",
        "targets/watching.py",
        "        if not has_bits(view, expected.to(view.dtype)):",
        "        if False:",
        Tests("targets/test_watching.py", "changed_unseen"),
    ),
    Mutant(
        "the first load is believed",
        "targets/first_load.py",
        "if by_region[table.index[piece.tensor], piece.region] != _result(piece, checkpoint_sums):",
        "if False:",
        Tests("targets/test_first_load.py", "changed_unseen"),
    ),
    Mutant(
        "what the first load does not explain is a constant",
        "targets/first_load.py",
        "if rest < reach(tensor) or not self._is_as_before(tensor):",
        "if False:",
        Tests("targets/test_first_load.py", "no_load_touches or computed_of_weights"),
    ),
    Mutant(
        "what goes unseen stays unseen",
        "targets/engine_layout.py",
        "if changed and not unclear_names:",
        "if False:",
        Tests("targets/test_watching.py", "goes_unseen"),
    ),
    Mutant(
        "padding that no load has written is taken for weights",
        "targets/engine_layout.py",
        "if restores_by_load:",
        "if True:",
        Tests("targets/test_learn.py", "never_loaded"),
    ),
    Mutant(
        "what was overwritten is still there",
        "targets/watching.py",
        "self.copies = [\n"
        "    arrived\n"
        "    for arrived in self.copies\n"
        "    if arrived.end <= copy.at or end <= arrived.at or not copy.overwrites(arrived.copy)\n"
        "]",
        "pass",
        Tests("targets/test_watching.py", "ways_of_loaders"),
    ),
    Mutant(
        "a shard lies where its memory begins",
        "targets/dtensors.py",
        "yield Piece(name, region, name, view.storage_offset() - first, tuple(view.stride()))",
        "yield Piece(name, region, name, view.storage_offset(), tuple(view.stride()))",
        Tests("targets/test_dtensors.py", "follow_a_run"),
    ),
    Mutant(
        "versions of a followed folder pile up",
        "targets/checkpoint_folder.py",
        "for name in others[: max(0, len(versions) - self.keep)]:",
        "for name in others[:0]:",
        Tests("hostile/test_folders.py", "pruned"),
    ),
    Mutant(
        "the current version of a followed folder is pruned",
        "targets/checkpoint_folder.py",
        "[name for _, name in sorted(versions) if name != current]",
        "[name for _, name in sorted(versions)]",
        Tests("hostile/test_folders.py", "pruned"),
    ),
    Mutant(
        "versions that a killed process left stay",
        "targets/checkpoint_folder.py",
        "self._folders = folders\nself.prune()\nreturn folders",
        "self._folders = folders\nreturn folders",
        Tests("hostile/test_folders.py", "pruned"),
    ),
    Mutant(
        "a draft that stays keeps a folder from opening",
        "targets/checkpoint_folder.py",
        "with contextlib.suppress(OSError):\nbuilding.remove(name)",
        "building.remove(name)",
        Tests("hostile/test_folders.py", "cannot_be_removed"),
    ),
    Mutant(
        "a file that travels lies in any number of folders",
        "session/store/records.py",
        'if checked_file_name(name).count("/") > _MOST_FOLDERS:',
        "if not checked_file_name(name):",
        Tests("session/test_side_files.py", "few_folders"),
    ),
)
