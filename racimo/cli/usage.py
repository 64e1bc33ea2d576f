"""What a user typed and nobody can mean. Light: `racimo --help` imports nothing else of the command line."""

USAGE = 2


class UsageError(Exception):
    """`text` goes to stderr as it is; the exit code is 2."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
