"""Ways to be wrong in weights/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "pieces of fp32 that is cast lie where those of bf16 would",
        "weights/on_gpu.py",
        "address=cut.address + offset * widths",
        "address=cut.address + offset * self.dtype.width",
        Tests("weights/test_cast_runs.py", "of_their_own"),
    ),
    Mutant(
        "torch writes the first change alone",
        "weights/on_gpu.py",
        "base[offsets] = new_bits",
        "base[offsets[:1]] = new_bits[:1]",
        Tests("patch/test_torch_writes.py", "every_layout"),
    ),
    Mutant(
        "copies on two ranks of an engine may differ",
        "weights/engine_sums.py",
        "if sums.setdefault(place, part) != part:",
        "if sums.setdefault(place, part) is None:",
        Tests("integrations/test_verify.py", "parts_and_copies"),
    ),
    Mutant(
        "elements that no rank of an engine has are left out",
        "weights/engine_sums.py",
        "            if missing:\n",
        "            if False:\n",
        Tests("integrations/test_verify.py", "left_out"),
    ),
    Mutant(
        "a whole region is not all of its tensor",
        "weights/shards.py",
        "None if part.region == whole_tensor else part.region",
        "part.region",
        Tests("patch/test_regions.py", "all_of_its_tensor"),
    ),
    Mutant(
        "the digest forgets names",
        "weights/table.py",
        'return f"{self.dtype.name}{list(self.shape)}{self.name}".encode()',
        'return f"{self.dtype.name}{list(self.shape)}".encode()',
        Tests("weights/test_digest.py", "tells_apart"),
    ),
    Mutant(
        "the digest forgets shapes",
        "weights/table.py",
        'return f"{self.dtype.name}{list(self.shape)}{self.name}".encode()',
        'return f"{self.dtype.name}{self.name}".encode()',
        Tests("weights/test_digest.py", "tells_apart"),
    ),
    Mutant(
        "known tensors may have other names",
        "weights/known.py",
        "tuple(weights) != self._names or",
        "",
        Tests("weights/test_known.py", "other_names"),
    ),
    Mutant(
        "an array that cannot be written to passes for one that can",
        "weights/columns.py",
        "self.are_writable = bool(columns.writable.all())",
        "self.are_writable = True",
        Tests("weights/test_known.py", "only_be_read"),
    ),
    Mutant(
        "a lazy negative view passes for its memory",
        "weights/columns.py",
        'if True in map(sys.modules["torch"].Tensor.is_neg, tensors) or',
        "if",
        Tests("weights/test_columns.py", "odd_tensor"),
    ),
    Mutant(
        "a freed tensor at a low address passes for one with memory",
        "weights/columns.py",
        "low[(offsets > 0) | (addresses[low] == 0)]",
        "low[addresses[low] == 0]",
        Tests("weights/test_columns.py", "low_addresses"),
    ),
    Mutant(
        "a tensor that moved to other strides stays known",
        "weights/columns.py",
        "and self.strides == other.strides",
        "",
        Tests("weights/test_known.py", "has_moved"),
    ),
    Mutant(
        "batches of small tensors come by dtype, not where they are full",
        "weights/batches.py",
        "sorted(due, key=itemgetter(0))",
        "due",
        Tests("weights/test_batches.py"),
    ),
    Mutant(
        "tensors that share some memory pass for separate ones",
        "weights/memory.py",
        "if _share(memory, other):",
        "if memory is None:",
        Tests("weights/test_memory.py", "shared"),
    ),
    Mutant(
        "regions may overlap",
        "weights/region.py",
        "if (pair := first_overlap(regions)) is not None:",
        "if (pair := first_overlap(regions[:1])) is not None:",
        Tests("patch/test_regions.py", "overlapping"),
    ),
    Mutant(
        "overlap is sought along one dimension",
        "weights/region.py",
        "overlaps &= (start[d][a] < stop[d][b]) & (start[d][b] < stop[d][a])",
        "overlaps |= (start[d][a] < stop[d][b]) & (start[d][b] < stop[d][a])",
        Tests("weights/test_region.py", "overlap"),
    ),
    Mutant(
        "what no rank has is not missed",
        "weights/shards.py",
        "if missing or not covered:",
        "if missing < 0:",
        Tests("weights/test_shards.py"),
    ),
    Mutant(
        "a cut goes through a region",
        "weights/region.py",
        "reach = np.maximum.accumulate(high[a:b] + shift)",
        "reach = high[a:b] + shift",
        Tests("weights/test_region.py", "overlap or compared"),
    ),
)
