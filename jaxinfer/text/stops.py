"""Stop strings, found in text that arrives in pieces cut anywhere."""

from __future__ import annotations


class StopStrings:
    """Passes text on until a stop string is complete.

    The stop string that is complete first wins; where several are complete with the same
    character, the longest. So the result depends on the text alone, never on how it was cut.
    Only the longest suffix that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """stops: none of them empty. include: leave the stop string that ends the text in it."""
        self._stops = stops
        self._include = include
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matched

    def feed(self, text: str) -> str:
        """Takes the next piece; returns what is safe to emit. After a match, always ""."""
        if self._matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        match = self._earliest_match(buffer)
        if match is not None:
            end, self._matched = match
            self._held = ""
            return buffer[: end if self._include else end - len(self._matched)]
        safe = len(buffer) - self._held_length(buffer)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """Returns what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _earliest_match(self, buffer: str) -> tuple[int, str] | None:
        """(end, stop string) of the match that ends first; the longest of those that end there."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])

    def _held_length(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that a stop string begins with."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._first_chars:
                suffix = buffer[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return len(suffix)
        return 0
