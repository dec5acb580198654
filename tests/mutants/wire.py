"""Ways to be wrong in wire/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "the checksum is not compared",
        "wire/cursor.py",
        "if checksum(body) != bytes(view[-CHECKSUM_BYTES:]):",
        'if checksum(body) == b"":',
        Tests("patch/test_refused_patches.py", "flipped_bit"),
    ),
    Mutant(
        "base and result change places in the footer",
        "wire/patchfile.py",
        "footer.base.to_bytes() + footer.result.to_bytes()",
        "footer.result.to_bytes() + footer.base.to_bytes()",
        Tests("patch/test_diff_apply.py", "on_disk_and_in_memory and (gap or ctx)"),
    ),
    Mutant(
        "files of a patch are not compared with their hash",
        "wire/file_section.py",
        "if hashlib.sha256(data).digest() != hash:",
        'if hashlib.sha256(data).digest() == b"":',
        Tests("cli/test_patch_files.py", "checked_by_their_hash"),
    ),
)
