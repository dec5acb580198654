"""Ways to be wrong in transport/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "a bucket that came on a GPU changes with the next frame",
        "transport/groups/frames.py",
        "self._received = host.numpy()",
        "self._received = self.tensor().numpy()",
        Tests("session/test_group_baselines.py", "a_frame"),
    ),
    Mutant(
        "the condition of a swap in a folder is not looked at",
        "transport/stores/folder.py",
        "if current_tag != tag:",
        'if current_tag is not None and tag == "":',
        Tests("session/test_session_publisher.py", "two_publishers or racing"),
    ),
    Mutant(
        "a lock whose holder is stopped is waited for at every attempt",
        "transport/stores/folder.py",
        "lock(handle, 0.0 if self._timed_out else self._wait)",
        "lock(handle, self._wait)",
        Tests("hostile/test_folders.py", "not_waited_for_again"),
    ),
    Mutant(
        "a body is as long as its server likes",
        "transport/stores/http_client.py",
        "if size > max_bytes:",
        "if size > 2 * max_bytes:",
        Tests("hostile/test_http.py", "read_to_its_limit"),
    ),
    Mutant(
        "redirects lead anywhere",
        "transport/stores/web.py",
        "same = place.scheme in PORTS and read_origin(place, location) == origin",
        "same = place.scheme in PORTS",
        Tests("hostile/test_http.py", "redirects"),
    ),
    Mutant(
        "who has no token keeps a connection",
        "transport/server/app.py",
        '\'Bearer realm="sparserl"\', "Connection": "close"})',
        "'Bearer realm=\"sparserl\"'})",
        Tests("hostile/test_clients.py", "heard_once"),
    ),
    Mutant(
        "what lies in a mirror is believed",
        "transport/stores/mirror.py",
        "if has_named_hash(data, name):",
        "if data:",
        Tests("session/test_neighbours.py", "damage_in_a_mirror"),
    ),
    Mutant(
        "what a neighbour sends is believed",
        "transport/stores/nearest.py",
        "if not has_named_hash(stored.data, name):",
        "if not stored.data:",
        Tests("session/test_neighbours.py", "neighbour_damages"),
    ),
    Mutant(
        "neighbours may have anything fetched",
        "transport/stores/mirror.py",
        "if name not in self._led_to[1]:",
        "if not self._led_to[1]:",
        Tests("session/test_neighbours.py", "anything_else or no_head_leads"),
    ),
    Mutant(
        "what is lost is looked for whenever a neighbour asks for it",
        "transport/stores/mirror.py",
        "self._led_to[1].discard(name)",
        "self._led_to[1].add(name)",
        Tests("session/test_neighbours.py", "no_head_leads"),
    ),
    Mutant(
        "neighbours can have less than the protocol allows to be stored",
        "transport/stores/mirror.py",
        "MOST_OBJECT_BYTES = 1 << 30",
        "MOST_OBJECT_BYTES = 1 << 27",
        Tests("session/test_neighbours.py", "large_object"),
    ),
    Mutant(
        "what was verified once is believed, though it was changed",
        "transport/stores/mirror.py",
        "self._intact.get(name) == stamp if",
        "name in self._intact if",
        Tests("session/test_neighbours.py", "damaged_while or read_once"),
    ),
    Mutant(
        "what a mirror has waits for what it has not",
        "transport/server/app.py",
        "if await loop.run_in_executor(self._verifier, mirror.verify, name):",
        "if await loop.run_in_executor(self._fillers, mirror.verify, name):",
        Tests("session/test_neighbours.py", "waits_for_nothing"),
    ),
    Mutant(
        "a reader that takes nothing holds as much as any",
        "transport/server/responses.py",
        "max(_LEAST_CHUNK, (_ROOM - self._held) // _SHARES)",
        "_CHUNK",
        Tests("transport/test_server_clients.py", "many_who"),
    ),
    Mutant(
        "a request may say its length twice",
        "transport/server/connections.py",
        'if b"," in b",".join(_LENGTH.findall(head)):',
        "if not head:",
        Tests("transport/test_server_clients.py", "one_length"),
    ),
    Mutant(
        "a URL of a file is a path as it stands",
        "files.py",
        "os.fsdecode(unquote_to_bytes(os.fsencode(text[scheme.end() :])))",
        "text[scheme.end() :]",
        Tests("session/test_silence.py", "urls_of_files"),
    ),
)
