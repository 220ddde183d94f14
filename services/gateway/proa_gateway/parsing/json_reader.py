"""JsonReader: arguments that are written as JSON. They are passed on as they are."""

from proa_gateway.parsing.json_scanner import JsonScanner


class JsonReader:
    """An `ArgumentsReader`. Arguments that are no object are taken for text after the call."""

    __slots__ = ("_begun", "is_complete", "rest", "scanner")

    def __init__(self) -> None:
        self.scanner = JsonScanner()
        self._begun = False
        self.is_complete = False
        self.rest = ""

    def feed(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            self._begun = True
            if text[0] != "{":
                self.is_complete, self.rest = True, text
                return ""
        end = self.scanner.scan(text)
        if self.scanner.is_complete:
            self.is_complete, self.rest = True, text[end:]
        return text[:end]

    def close(self, *, by_model: bool) -> str:
        return ""
