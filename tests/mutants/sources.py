"""Ways to be wrong in sources/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "old bits that were not committed are forgotten",
        "sources/tracker.py",
        "published = kept.publish(r, earlier.get(row.key))",
        "published = kept.publish(r, None)",
        Tests("sources/test_track_steps.py", "failed_publishes"),
    ),
    Mutant(
        "only the changes of the last step are sent",
        "sources/kept_bits.py",
        "positions, old_bits = merge_old(kept.positions, kept.bits, positions, old_bits)",
        "pass",
        Tests("sources/test_track.py", "add_up"),
    ),
    Mutant(
        "flat shards are put at the beginning of their parameters",
        "sources/dtensors.py",
        "boxes(shard.shape, shard.start, shard.start + shard.data.numel())",
        "boxes(shard.shape, 0, shard.data.numel())",
        Tests("sources/test_flat_shards.py", "partitions_of_zero3"),
    ),
    Mutant(
        "the padding of a partition is published",
        "sources/flat_shards.py",
        "count = min(data.ds_numel, max(0, parameter.ds_numel - start))",
        "count = data.ds_numel",
        Tests("sources/test_flat_shards.py", "partitions_of_zero3"),
    ),
    Mutant(
        "of two tensors that get one name, one is dropped whatever its bits are",
        "sources/renaming.py",
        "return bool(mine.address) and mine[:4] == others[:4]",
        "return mine[:2] == others[:2]",
        Tests("sources/test_renaming.py", "tied or cannot_be_meant"),
    ),
    Mutant(
        "tensors are not quantized anew, whatever has changed",
        "sources/quantized_view.py",
        "if before.has_data(data)",
        "",
        Tests("session/test_quantized_runs.py", "separate_publishers"),
    ),
    Mutant(
        "quantized layers that engines fuse have global scales of their own",
        "sources/schemes.py",
        "_FUSED.get(layer, layer)",
        "layer",
        Tests("sources/test_quantized_formats.py", "engines_fuse"),
    ),
    Mutant(
        "quantized changes of a publish that failed are forgotten",
        "sources/quantized_changes.py",
        "self._piece = piece.under(later)",
        "self._piece = later",
        Tests("sources/test_quantized_formats.py", "failed"),
    ),
    Mutant(
        "a block with an infinity spoils the global scale of its matrix",
        "sources/quantize_plan.py",
        "blocks.masked_fill(blocks.isinf(), 0.0).amax",
        "blocks.amax",
        Tests("sources/test_quantized_formats.py", "infinity"),
    ),
    Mutant(
        "a data-parallel rank publishes a range of columns as a range of rows",
        "sources/megatron_optimizer.py",
        "steps.reverse()",
        "",
        Tests("sources/test_megatron_optimizer.py", "range_of_a_parameter"),
    ),
    Mutant(
        "the stage with multi-token prediction publishes its copy of the embedding",
        "sources/megatron_core.py",
        "parameters[name] = stage.vocabulary(model.names_of(EMBEDDING, table), padded_vocab).owned(False)",
        "parameters[name] = stage.vocabulary(model.names_of(EMBEDDING, table), padded_vocab)",
        Tests("sources/test_megatron_families.py", "multi_token"),
    ),
    Mutant(
        "the last old bits of an element count, not the first",
        "sources/kept_bits.py",
        "positions, old_bits = merge_old(kept.positions, kept.bits, positions, old_bits)",
        "positions, old_bits = merge_old(positions, old_bits, kept.positions, kept.bits)",
        Tests("sources/test_track_old_bits.py", "same_bytes"),
    ),
    Mutant(
        "each rank draws a sample of its own part",
        "sources/master_sample.py",
        "_inside(_sampled(name, numel, count, self._seed), shape, region)",
        "_sampled(name, region.numel, min(count, region.numel), self._seed)",
        Tests("record/test_masters.py", "which_elements"),
    ),
    Mutant(
        "the A of a fused layer is published for one of its tensors alone",
        "sources/megatron_adapters.py",
        '[f"{name}A.weight" for name in matrices]',
        '[f"{matrices[0]}A.weight"]',
        Tests("sources/test_megatron_adapters.py", "cut_layers"),
    ),
    Mutant(
        "every rank publishes what is outside of the language model",
        "sources/megatron_core.py",
        "entire(self.table, tensor).owned(self.ranks.tp == 0 and self.ranks.dp == 0)",
        "entire(self.table, tensor)",
        Tests("sources/test_megatron_families.py", "outside"),
    ),
    Mutant(
        "modules that no map names are left out without a word",
        "sources/megatron_source.py",
        "if len(inside) < len(others):",
        "if False:",
        Tests("sources/test_megatron_families.py", "outside"),
    ),
    Mutant(
        "a parameter that is cut by columns is taken for a whole one",
        "sources/megatron_core.py",
        'zip(("rows", "columns"), shape, of_tensor, strict=False)',
        'zip(("rows",), shape, of_tensor, strict=False)',
        Tests("sources/test_megatron_families.py", "cut_as"),
    ),
)
