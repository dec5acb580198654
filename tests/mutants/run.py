"""Break the code in named ways, one at a time, and see that the tests notice.

Each mutant is one exact replacement in one file. It is run against the tests that are there to catch it; a mutant
that survives, or whose text is no longer found, makes this program fail. The same tests are run on the unbroken code
first, so that red means something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2
SECONDS = 200  # for one run of pytest
GREEN, RED = 0, 1  # pytest's exit codes: all passed, some failed


@dataclass(frozen=True)
class Tests:
    """A test file (under tests), and which of its tests."""

    file: str
    words: str = ""

    @property
    def keywords(self) -> str:
        stem = Path(self.file).stem
        return f"({stem} and ({self.words}))" if self.words else stem


@dataclass(frozen=True)
class Mutant:
    """A way to be wrong: in `file` (under src/sparserl), `old` becomes `new`, and the tests must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: Tests

    @property
    def compiled(self) -> bool:
        return self.file.startswith("kernels/")


KERNELS, CODEC, PLAN = "kernels/test_cpu.py", "codec/test_codec.py", "plan/test_plan.py"
CLASSES, RANS, CTX = "kernels/test_classes.py", "kernels/test_rans.py", "patch/test_ctx.py"
SESSION, SIGNING = "session/test_session.py", "session/test_signing.py"
HOSTILE_SESSIONS = "hostile/test_sessions.py"
TRACKED, COLLECTIVE, MARKED = "session/test_tracked.py", "session/test_collective.py", "patch/test_marked.py"
APPLY, REGIONS, COMPOSE = "patch/test_diff_apply.py", "patch/test_regions.py", "patch/test_compose.py"
FOLDERS = "hostile/test_folders.py"
CHANGES = Tests(APPLY, "every_kind_of_change and (bfloat16 or float32) or zero_signs")
REFUSED = Tests(APPLY, "wrong_base or does_not_hold or vouching")

MUTANTS = (
    Mutant(
        "zeros compared by value: a flipped sign is lost",
        "patch/compare.py",
        "        positions, before, after = (column[:n].copy() for column in columns)\n",
        "        positions, before, after = (column[:n].copy() for column in columns)\n"
        "        real = ((before | after) << 1) != 0\n"
        "        counts = np.bincount(np.repeat(np.arange(size.size), counts)[real], minlength=size.size)\n"
        "        positions, before, after = (column[real] for column in (positions, before, after))\n",
        CHANGES,
    ),
    Mutant(
        "the last element is not compared",
        "patch/compare.py",
        "scan(tag, old, new, batch.numel)",
        "scan(tag, old, new, batch.numel - 1)",
        CHANGES,
    ),
    Mutant(
        "a superset of the changes is taken for the changes",
        "patch/compare.py",
        "        real = before != after\n",
        "        real = before == before\n",
        Tests(APPLY, "known or bad_positions"),
    ),
    Mutant(
        "a whole region is not all of its tensor",
        "weights/shards.py",
        "None if part.region == every else part.region",
        "part.region",
        Tests(REGIONS, "all_of_its_tensor"),
    ),
    Mutant(
        "the tail of a block is seen twice",
        "kernels/cpu/changes.py",
        "return (differ64(tag, a + last, b + last) >> seen) << seen",
        "return differ64(tag, a + last, b + last)",
        Tests(KERNELS, "diff"),
    ),
    Mutant(
        "the digest forgets positions inside a block",
        "kernels/cpu/llvm.py",
        "            weyl = b.add(first, mix.constant(*(i * GOLDEN for i in range(mix.lanes))))\n",
        "            weyl = first\n",
        Tests(KERNELS, "digest"),
    ),
    Mutant(
        "the digest forgets where a box lies",
        "kernels/cpu/changes.py",
        "            at = start[e] + _offset(p, e, dims, size, stride)\n",
        "            at = start[e] + p\n",
        Tests("test_digest.py", "shards"),
    ),
    Mutant(
        "the digest forgets names",
        "weights/table.py",
        'return f"{self.dtype.name}{list(self.shape)}{self.name}".encode()',
        'return f"{self.dtype.name}{list(self.shape)}".encode()',
        Tests("test_digest.py", "tells_apart"),
    ),
    Mutant(
        "the digest forgets shapes",
        "weights/table.py",
        'return f"{self.dtype.name}{list(self.shape)}{self.name}".encode()',
        'return f"{self.dtype.name}{self.name}".encode()',
        Tests("test_digest.py", "tells_apart"),
    ),
    Mutant(
        "the length of a stored chunk is not checked",
        "codec/coders.py",
        "        if len(coded) != size:\n",
        "        if len(coded) < 0:\n",
        Tests(CODEC),
    ),
    Mutant(
        "counts of tiles need not add up",
        "kernels/cpu/changes.py",
        "        if left:\n            return e\n",
        "        if left < 0:\n            return e\n",
        Tests(KERNELS, "tile"),
    ),
    Mutant(
        "a tile may reach past the end of its region",
        "kernels/cpu/changes.py",
        "end = min(np.int64(j + 1) << log, numel[e])",
        "end = np.int64(j + 1) << log",
        Tests(KERNELS, "tile"),
    ),
    Mutant(
        "steps that cross zero keep the sign",
        "kernels/cpu/changes.py",
        "    word += ((np.uint64(step) >> _ONE) ^ (zero - (np.uint64(step) & _ONE))) << up\n"
        "    word ^= np.uint64(np.int64(word) >> np.int64(63)) & mirrors\n",
        "    sign = np.uint64(np.int64(word) >> np.int64(63)) & mirrors\n"
        "    word += ((np.uint64(step) >> _ONE) ^ (zero - (np.uint64(step) & _ONE))) << up\n"
        "    word ^= sign\n",
        Tests(KERNELS, "steps"),
    ),
    Mutant(
        "positions past 2^31 wrap",
        "kernels/cpu/changes.py",
        "            out[k] = start[e] + _offset(np.int64(positions[k]), e, dims, size, stride)\n",
        "            out[k] = np.int32(start[e] + _offset(np.int64(positions[k]), e, dims, size, stride))\n",
        Tests(KERNELS, "locate"),
    ),
    Mutant(
        "the base is not checked",
        "patch/apply.py",
        "    if current != patch.base:\n",
        "    if current is None:\n",
        REFUSED,
    ),
    Mutant(
        "the result is not checked",
        "patch/apply.py",
        "    if result != patch.result:\n",
        "    if result is None:\n",
        REFUSED,
    ),
    Mutant(
        "weights are written before the result is known",
        "patch/apply.py",
        "    return Staged(decoded, replace(",
        "    replace(old, bits=new, dense=decoded.dense_bits).write(held)\n    return Staged(decoded, replace(",
        REFUSED,
    ),
    Mutant(
        "old bits are not put back",
        "patch/apply.py",
        "            for old, _ in log:\n                old.write(held)\n",
        "",
        REFUSED,
    ),
    Mutant(
        "a bucket that fails half-way stays as it is",
        "patch/apply.py",
        "    except BaseException:\n        old.write(held)\n        raise\n",
        "    except BaseException:\n        raise\n",
        Tests(APPLY, "before_an_error"),
    ),
    Mutant(
        "buckets go on landing while others are put back",
        "parallel.py",
        "        wait([future for future in flight if not future.cancel()])",
        "        [future for future in flight if not future.cancel()]",
        Tests("test_threads.py", "behind"),
    ),
    Mutant(
        "tied tensors may be told to differ",
        "patch/apply.py",
        "    refuse_conflicts(patch, held, tied, kept)\n",
        "",
        Tests(APPLY, "tied"),
    ),
    Mutant(
        "read-only and folded memory is written",
        "patch/apply.py",
        "    require_writable((patch.table[t].name, memory) for (t, _), memory in held.parts if t in touched)\n",
        "    del touched\n",
        Tests("test_memory.py", "cannot_take_a_patch and not read-only and not broadcast"),
    ),
    Mutant(
        "tensors that share some memory pass for separate ones",
        "weights/memory.py",
        "        if _share(held[name], held[group[0]]):\n",
        "        if held is None:\n",
        Tests("test_memory.py", "shared"),
    ),
    Mutant(
        "regions may overlap",
        "weights/region.py",
        "    if (pair := first_overlap(regions)) is not None:\n",
        "    if (pair := first_overlap(regions[:1])) is not None:\n",
        Tests(REGIONS, "overlapping"),
    ),
    Mutant(
        "overlap is sought along one dimension",
        "weights/region.py",
        "            hit &= (start[d][a] < stop[d][b]) & (start[d][b] < stop[d][a])\n",
        "            hit |= (start[d][a] < stop[d][b]) & (start[d][b] < stop[d][a])\n",
        Tests("test_region.py", "overlap"),
    ),
    Mutant(
        "the checksum is not compared",
        "wire/cursor.py",
        "    if checksum(body) != bytes(view[-CHECKSUM_BYTES:]):\n",
        '    if checksum(body) == b"":\n',
        Tests(APPLY, "flipped_bit"),
    ),
    Mutant(
        "base and result change places in the footer",
        "wire/patchfile.py",
        "footer.base.to_bytes() + footer.result.to_bytes()",
        "footer.result.to_bytes() + footer.base.to_bytes()",
        CHANGES,
    ),
    Mutant(
        "positions of a split entry count from the old start",
        "plan/routing.py",
        "            piece.positions = piece.positions - np.uint32(at)\n",
        "",
        Tests(PLAN, "cut_by"),
    ),
    Mutant(
        "entries are put in order without their changes",
        "plan/buckets.py",
        "    return [np.concatenate(positions)[take]], [np.concatenate(words)[take]]\n",
        "    return positions, words\n",
        Tests(PLAN, "share_buckets"),
    ),
    Mutant(
        "a bucket takes entries that no profile can hold",
        "plan/buckets.py",
        "        if part.count.size and self.costs and not self.costs.keys() & part.cost.keys():\n",
        "        if part.count.size < 0:\n",
        Tests(COMPOSE, "different_kinds"),
    ),
    Mutant(
        "squashed steps survive the bits laid over them",
        "patch/compose.py",
        "            keep = ~among(self.where[False], where)\n",
        "            keep = np.ones(self.where[False].size, bool)\n",
        Tests(COMPOSE, "bits_and_steps or dense_entries"),
    ),
    Mutant(
        "squashed windows lose their first element",
        "patch/located.py",
        "                    if a < b:\n",
        "                    a += int(a > 0)\n                    if a < b:\n",
        Tests(COMPOSE, "without_the_base"),
    ),
    Mutant(
        "merged digests count the table twice",
        "patch/compose.py",
        "    base = sum((p.base - terms if p.complete else p.base for p in patches), start)\n",
        "    base = sum((p.base for p in patches), start)\n",
        Tests(REGIONS, "holds_everything"),
    ),
    Mutant(
        "a class begins one above its threshold",
        "kernels/cpu/classes.py",
        "c += np.int64(size >= limits[j])",
        "c += np.int64(size > limits[j])",
        Tests(CLASSES, "every_size and 2-float-3"),
    ),
    Mutant(
        "masks of a class take in its threshold",
        "kernels/cpu/llvm.py",
        '[b.icmp_unsigned("<", x, limit) for x in here]',
        '[b.icmp_unsigned("<=", x, limit) for x in here]',
        Tests(CLASSES, "every_size and 2-float-3"),
    ),
    Mutant(
        "limits that a byte does not tell are taken for such",
        "kernels/cpu/classes.py",
        "short &= limit & ~_HIGH == 0",
        "short &= limit & np.uint64(127) == 0",
        Tests(CLASSES, "byte_tells"),
    ),
    Mutant(
        "sixteen numbers may take more low bits than there are",
        "kernels/cpu/llvm.py",
        "b.select(b.and_(within, b.not_(_any(b, above))), total, _I64(-1))",
        "b.select(b.not_(_any(b, above)), total, _I64(-1))",
        Tests(KERNELS, "unpack"),
    ),
    Mutant(
        "what is summed up on the way to a change takes another key",
        "kernels/cpu/changes.py",
        "line, stop = (origin, step, keys[e, 1]),",
        "line, stop = (origin, step, keys[e, 0]),",
        Tests(KERNELS, "test_gather_and_scatter"),
    ),
    Mutant(
        "magnitudes keep their sign",
        "codec/ctx.py",
        "(1 << (width - dtype.sign_magnitude)) - 1",
        "(1 << width) - 1",
        Tests(CODEC, "class_streams and bfloat16"),
    ),
    Mutant(
        "ranks in a class run on from tile to tile",
        "kernels/cpu/classes.py",
        "            seen[:] = 0\n            last[:] = -1\n",
        "            if tile == 0:\n                seen[:] = 0\n                last[:] = -1\n",
        Tests(CLASSES, "stretches_and_tiles and 2-float"),
    ),
    Mutant(
        "elements of a class in the last, partial block are not seen",
        "kernels/cpu/classes.py",
        "        if rest:\n",
        "        if rest < 0:\n",
        Tests(CLASSES, "every_size and 2-float-3"),
    ),
    Mutant(
        "a stretch behind a partial one is not whole",
        "kernels/cpu/classes.py",
        "    if masks[last, _BLOCKS - 1] != _ALL:",
        "    if masks[last, 0] != _ALL:",
        Tests(CLASSES, "behind_partial and 2"),
    ),
    Mutant(
        "gaps in a class may lead out of their tile",
        "kernels/cpu/classes.py",
        "            if here:\n                return k, e\n",
        "            if here < 0:\n                return k, e\n",
        Tests(CLASSES, "does_not_fit or next_tile or at_fault"),
    ),
    Mutant(
        "an entry may have fewer changes in its classes than it says",
        "kernels/cpu/classes.py",
        "        if due:\n            return k, e\n",
        "        if due < 0:\n            return k, e\n",
        Tests(CLASSES, "does_not_fit or at_fault"),
    ),
    Mutant(
        "what landed before a gap was at fault stays",
        "kernels/cpu/classes.py",
        "    if land and bad >= 0:\n",
        "    if land and bad >= 1 << 30:\n",
        Tests(CLASSES, "does_not_fit"),
    ),
    Mutant(
        "counts by class need not add up to those of the entries",
        "codec/ctx.py",
        "        if int(totals.sum()) != layout.changes:\n",
        "        if int(totals.sum()) < 0:\n",
        Tests(CODEC, "counts_of_classes"),
    ),
    Mutant(
        "thresholds of classes need not rise",
        "codec/ctx.py",
        "    if not rising or thresholds[-1] >= KEYS",
        "    if thresholds[-1] >= KEYS",
        Tests(CODEC, "no_sense"),
    ),
    Mutant(
        "changes found class by class are taken to be in order",
        "patch/compose.py",
        "    decoded = decoded.in_order()\n",
        "",
        Tests(CTX, "undone"),
    ),
    Mutant(
        "the table finds the bit before the one that is sought in a class",
        "kernels/cpu/llvm.py",
        "b.mul(b.add(rank, _I64(1)), each)",
        "b.mul(rank, each)",
        Tests(CLASSES, "select"),
    ),
    Mutant(
        "rans states may end anywhere",
        "kernels/cpu/rans.py",
        "        if np.uint64(x[lane]) != _LOW:\n",
        "        if np.uint64(x[lane]) < _ONE:\n",
        Tests(RANS, "any_states or flipped"),
    ),
    Mutant(
        "rans words may be left over",
        "kernels/cpu/rans.py",
        "    return left == 0\n",
        "    return left >= 0\n",
        Tests(RANS, "behind_them"),
    ),
    Mutant(
        "rans words that are missing pass for zeros",
        "kernels/cpu/rans.py",
        "    return left == 0\n",
        "    return left <= 0\n",
        Tests(RANS, "truncated or missing"),
    ),
    Mutant(
        "items are lent from memory that may change",
        "codec/streams.py",
        "chunks.data if safe and ",
        "chunks.data if ",
        Tests(CODEC, "lent"),
    ),
    Mutant(
        "rans frequencies need not add up",
        "kernels/cpu/rans.py",
        "    if left < 1 or (at & 7",
        "    if left < -(1 << 30) or (at & 7",
        Tests(RANS, "do_not_add_up"),
    ),
    Mutant(
        "the baseline advances before the head moved",
        "session/store/publisher.py",
        "        sent = self._send(now.run, encoded, watch)\n        if sent.manifest.base",
        "        now.baseline.advance(encoded(), found)\n"
        "        sent = self._send(now.run, encoded, watch)\n        if sent.manifest.base",
        Tests(SESSION, "failed_publish or bit_for_bit"),
    ),
    Mutant(
        "the head is moved without a condition",
        "session/store/head.py",
        "                self._tag = self._store.swap(HEAD, data, self._tag)\n",
        "                self._store.put(HEAD, data)\n",
        Tests(SESSION, "two_publishers or racing"),
    ),
    Mutant(
        "a lost reply is taken for a failure",
        "session/store/head.py",
        "(head.nonce == nonce or _same_version(head, ours))",
        "_same_version(head, ours)",
        Tests(SESSION, "reply_that_was_lost"),
    ),
    Mutant(
        "a restarted publisher does not fetch the patches since its anchor",
        "session/store/resume.py",
        "            patches += [parcel.receive(store, head.run, run.table, step) for step in steps]\n",
        "",
        Tests(SESSION, "restarted"),
    ),
    Mutant(
        "captured weights are the trainer's own",
        "session/store/transfer.py",
        "Bits(memory.copied(), memory.dtype)",
        "Bits(memory.view(), memory.dtype)",
        Tests(SESSION, "training_goes_on or bit_for_bit"),
    ),
    Mutant(
        "targets that committed before one failed stay as they are",
        "session/receiver.py",
        "            for undo in reversed(done):\n                undo()\n",
        "",
        Tests(SESSION, "all_targets"),
    ),
    Mutant(
        "an older head is believed",
        "session/store/subscriber.py",
        "            if head.run == run and head.version < version:\n",
        "            if head.version < 0:\n",
        Tests(SIGNING, "rolled_back"),
    ),
    Mutant(
        "an older run is believed",
        "session/store/subscriber.py",
        "head.run != run and head.created <= created:",
        "head.run == run and head.created < created:",
        Tests(SIGNING, "older_run"),
    ),
    Mutant(
        "a head without a signature is believed",
        "session/store/signing.py",
        '        raise Untrusted(f"{what} is not signed, and a key is pinned")\n',
        "        return body.encode()\n",
        Tests(SIGNING, "unsigned or belongs"),
    ),
    Mutant(
        "any key will do",
        "session/store/signing.py",
        "    if key != _public(pinned):\n",
        "    if not _public(pinned):\n",
        Tests(SIGNING, "foreign"),
    ),
    Mutant(
        "objects need not be what their names promise",
        "session/store/records.py",
        "    if sha256(data) != hash:\n",
        "    if not hash:\n",
        Tests(SIGNING, "bound_by_hash"),
    ),
    Mutant(
        "a commit does not look at what it writes over",
        "patch/apply.py",
        "                self._require_tracked(sum((moved for _, moved in log), self.base))\n",
        "",
        Tests(SESSION, "others_wrote"),
    ),
    Mutant(
        "names that share memory are not looked at before a commit",
        "patch/apply.py",
        "    if not np.array_equal(found, part.old):\n",
        "    if found is None:\n",
        Tests(SESSION, "tied"),
    ),
    Mutant(
        "retention forgets live subscribers",
        "session/store/routes.py",
        "*(version for version in needed if version > too_old)",
        "",
        Tests(SESSION, "retention"),
    ),
    Mutant(
        "routes do not care about digests",
        "session/store/routes.py",
        "            if way.base_digest == node[1]:\n",
        "            if True:\n",
        Tests(SESSION, "cheapest"),
    ),
    Mutant(
        "the condition of a swap in a folder is not looked at",
        "transport/stores/folder.py",
        "            if there != tag:\n",
        '            if there is not None and tag == "":\n',
        Tests(SESSION, "two_publishers or racing"),
    ),
    Mutant(
        "what no rank has is not missed",
        "weights/shards.py",
        "        if missing or not found:\n",
        "        if missing < 0:\n",
        Tests("test_shards.py"),
    ),
    Mutant(
        "a rank that fails fails alone",
        "session/store/writers.py",
        "            if data[:1] != _DONE:\n",
        '            if data[:1] == b"?":\n',
        Tests("session/test_writers.py", "fail_together"),
    ),
    Mutant(
        "a baseline trusts marks",
        "session/baseline.py",
        "            weights = weights.map(lambda part: part.data)\n",
        "            pass\n",
        Tests(TRACKED, "loses_no_marks"),
    ),
    Mutant(
        "an anchor has only what is marked",
        "session/store/transfer.py",
        "        weights = weights.map(lambda part: part.data)  # marks count from another version\n",
        "",
        Tests(TRACKED, "exact and none"),
    ),
    Mutant(
        "marks pass for all changes, whatever the sums say",
        "patch/tracked.py",
        "and known[place] + moved[part] == now[place]",
        "",
        Tests(MARKED, "without_a_mark"),
    ),
    Mutant(
        "what was captured is the trainer's own memory",
        "patch/tracked.py",
        "        bits = held.bits(tensor, box).copy()\n",
        "        bits = held.bits(tensor, box)\n",
        Tests(MARKED, "captured"),
    ),
    Mutant(
        "ranks commit although one could not stage",
        "session/group/rounds.py",
        '    if failed:\n        round.tell("verdict", {"off": failed})\n',
        '    if failed and own:\n        round.tell("verdict", {"off": failed})\n',
        Tests(COLLECTIVE, "random_syncs"),
    ),
    Mutant(
        "the baseline moves on although a rank has not committed",
        "session/group/publisher.py",
        "        if failed:\n            raise SessionError(\n",
        "        if failed and taken.found is None:\n            raise SessionError(\n",
        Tests(COLLECTIVE, "random_syncs"),
    ),
    Mutant(
        "a rank that joined is sent patches it has no base for",
        "session/group/publisher.py",
        'anchor = any(hello["digest"] not in (old.hex, new.hex) for hello in receivers)',
        'anchor = all(hello["digest"] not in (old.hex, new.hex) for hello in receivers)',
        Tests(COLLECTIVE, "joins"),
    ),
    Mutant(
        "marks that were not committed are forgotten",
        "sources/tracked_rows.py",
        "            marks.unite(earlier.marks)\n",
        "",
        Tests("sources/test_track.py", "failed_publishes"),
    ),
    Mutant(
        "only the marks of the last step are sent",
        "sources/tracked_rows.py",
        "        first = plan.first[found.rows]\n",
        "        first = plan.first[found.rows]\n        self.words[:] = 0\n",
        Tests("sources/test_track.py", "add_up"),
    ),
    Mutant(
        "what a kernel has made is freed while its address is in use",
        "kernels/cpu/rans.py",
        "    alive(shares)\n",
        "",
        Tests("test_threads.py", "nobody_wrote"),
    ),
    Mutant(
        "links in a folder of ours are followed",
        "folders.py",
        "        return 0 if self.links else os.O_NOFOLLOW\n",
        "        return 0\n",
        Tests(FOLDERS, "links_in or at_any_moment"),
    ),
    Mutant(
        "a lock whose holder is stopped is waited for at every attempt",
        "transport/stores/folder.py",
        "(0 if self._stuck else self._wait)",
        "self._wait",
        Tests(FOLDERS, "not_waited_for_again"),
    ),
    Mutant(
        "a copy that nobody has verified is patched",
        "targets/checkpoint.py",
        "        rest = _rest(digest, patches, self._path)\n",
        "        rest = _rest(patches[0].base, patches, self._path)\n",
        Tests("hostile/test_odd_files.py", "what_was_verified"),
    ),
    Mutant(
        "a body is as long as its server likes",
        "transport/stores/web.py",
        "    if size > most:\n",
        "    if size > 2 * most:\n",
        Tests("hostile/test_http.py", "read_to_its_limit"),
    ),
    Mutant(
        "redirects lead anywhere",
        "transport/stores/web.py",
        "            same = there.scheme in _PORTS and _origin(there, place) == self._origin\n",
        "            same = there.scheme in _PORTS\n",
        Tests("hostile/test_http.py", "redirects"),
    ),
    Mutant(
        "who has no token keeps a connection",
        "transport/stores/server.py",
        """'Bearer realm="sparserl"', "Connection": "close"})\n""",
        """'Bearer realm="sparserl"'})\n""",
        Tests("hostile/test_clients.py", "heard_once"),
    ),
    Mutant(
        "a cut goes through a region",
        "weights/region.py",
        "        reach = np.maximum.accumulate(high[a:b] + shift)\n",
        "        reach = high[a:b] + shift\n",
        Tests("test_region.py", "overlap or compared"),
    ),
    Mutant(
        "buckets need not fit the weights they are for",
        "session/store/transfer.py",
        "    if count > elements or size > most:\n",
        "    if count > elements:\n",
        Tests("hostile/test_budgets.py", "larger_than_any_patch and in_memory"),
    ),
    Mutant(
        "weights are made for which there is no memory",
        "session/store/transfer.py",
        "        require_memory(table.dense_bytes)\n",
        "        pass\n",
        Tests("hostile/test_budgets.py", "do_not_fit"),
    ),
    Mutant(
        "a commit can be interrupted between two targets",
        "session/receiver.py",
        "        uninterrupted(lambda: self._commit_targets(staged))\n",
        "        self._commit_targets(staged)\n",
        Tests(HOSTILE_SESSIONS, "interrupt_at_any_line"),
    ),
    Mutant(
        "an anchor in the state folder goes before the head has moved",
        "session/store/resume.py",
        "        self.run = run\n        self._name = name\n",
        "        self.run = run\n        self._name = name\n        self.settle()\n",
        Tests(HOSTILE_SESSIONS, "throws_nothing_away"),
    ),
    Mutant(
        "every publish for a subscriber far behind writes an anchor",
        "session/store/publisher.py",
        "or len(since) >= _STEPS - 1",
        "or len(now.index.steps) >= _STEPS - 1",
        Tests(HOSTILE_SESSIONS, "far_behind"),
    ),
)


@contextmanager
def mutated(folder: Path, mutant: Mutant) -> Iterator[None]:
    """The folder's code with the mutant in it; afterwards the file is as it was, to the nanosecond."""
    path = folder / "src" / "sparserl" / mutant.file
    before, stamp = path.read_text(), path.stat()
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(before)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


class Pytest:
    """Runs tests on the code in a folder. A run is a fork of one process, which saves importing what they all need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",  # stale bytecode would hide a mutant
        }
        environment.pop("NUMBA_CACHE_DIR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("nursery.py")],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, tests: Iterable[Tests], cache: Path | None = None) -> tuple[int, str]:
        """Exit code and output. Kernels are cached beside the code, or elsewhere."""
        files = sorted({f"tests/{t.file}" for t in tests})
        words = " or ".join(sorted({t.keywords for t in tests}))
        imported = "ignore::pytest.PytestAssertRewriteWarning"  # that plugins are there already is what we want
        options = ["-W", imported, "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        output = self._folder / "output"
        there = None if cache is None else str(cache)
        order = {"args": [*options, *files, "-k", words], "cache": there, "seconds": SECONDS, "output": str(output)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, output.read_text(errors="replace")

    def close(self) -> None:
        self._process.communicate()


def judge(folder: Path, pytest: Pytest, mutant: Mutant) -> str | None:
    """None if the tests notice the mutant, else what went wrong."""
    cache = None
    if mutant.compiled:  # what is compiled from the mutant must not be found again
        cache = folder / "numba-mutant"
        shutil.rmtree(cache, ignore_errors=True)
    with mutated(folder, mutant):
        code, output = pytest([mutant.tests], cache)
    if code == RED:
        return None
    return "survived" if code == GREEN else f"pytest ended with {code}:\n{output[-2000:]}"


def control(pytest: Pytest, mutants: Iterable[Mutant]) -> str | None:
    """None if the tests pass on the code as it is, else what they say."""
    code, output = pytest([m.tests for m in mutants])
    return None if code == GREEN else f"pytest ended with {code}:\n{output[-2000:]}"


def report(name: str, wrong: str | None, began: float) -> bool:
    print(f"{'ok' if wrong is None else 'FAILED':<8}{time.monotonic() - began:6.1f} s  {name}", flush=True)
    if wrong is not None:
        print(f"        {wrong}", flush=True)
    return wrong is None


def work(folder: Path, mutants: list[Mutant], green: bool) -> bool:
    """The tests without a mutant, if it is not known that they pass, then each mutant. True if all were noticed."""
    skip = shutil.ignore_patterns("*.pyc", "data", ".hypothesis")  # what is compiled for the kernels comes along
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=skip)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    with closing(Pytest(folder)) as pytest:
        began = time.monotonic()
        if not green and not report(f"no mutant in the way of {len(mutants)}", control(pytest, mutants), began):
            return False
        good = True
        for mutant in mutants:
            began = time.monotonic()
            good &= report(mutant.name, judge(folder, pytest, mutant), began)
        return good


def shared(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Mutants for each worker: those of one test file together, since they use the same compiled kernels."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.tests.file, []).append(mutant)
    shares: list[list[Mutant]] = [[] for _ in range(WORKERS)]
    for group in sorted(by_file.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]


def require_texts(mutants: Iterable[Mutant]) -> None:
    """Leave, naming them, if the text of some mutants does not stand exactly once where it should."""
    lost = []
    for mutant in mutants:
        found = (ROOT / "src" / "sparserl" / mutant.file).read_text().count(mutant.old)
        if found != 1:
            lost.append(f"{mutant.name}: its text stands {found} times in {mutant.file}")
    if lost:
        raise SystemExit("\n".join(lost))


LONG = frozenset(
    (
        "rans frequencies need not add up",
        "what a kernel has made is freed while its address is in use",
        "rans states may end anywhere",
        "a stretch behind a partial one is not whole",
        "masks of a class take in its threshold",
        "rans words may be left over",
        "rans words that are missing pass for zeros",
        "the digest forgets where a box lies",
        "a baseline trusts marks",
        "ranks commit although one could not stage",
    )
)


def main(arguments: list[str]) -> int:
    """0 if every mutant that was asked for was noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants with one of these in their name")
    parser.add_argument("--all", action="store_true", help="also those that take long and are near others")
    parser.add_argument("--green", action="store_true", help="the tests have just passed: do not begin with them")
    asked = parser.parse_args(arguments)
    if missing := LONG - {m.name for m in MUTANTS}:
        raise SystemExit(f"there are no mutants named {sorted(missing)}")
    if asked.names:
        mutants = [m for m in MUTANTS if any(name in m.name for name in asked.names)]
    else:
        mutants = [m for m in MUTANTS if asked.all or m.name not in LONG]
    require_texts(mutants)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sparserl-mutants-") as home, ThreadPoolExecutor(WORKERS) as pool:
        shares = shared(mutants)
        folders = [Path(home) / str(i) for i in range(len(shares))]
        good = all(list(pool.map(lambda folder, share: work(folder, share, asked.green), folders, shares)))
    print(f"{len(mutants)} mutants, {'all noticed' if good else 'NOT all noticed'}, {time.monotonic() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
