"""Errors of the scheduler, each of which is a value of one request and never the end of the loop."""


class RequestRefused(Exception):
    """A request that is not admitted. `code` is stable and machine-readable, `message` is for a person.

    Codes: `context_length_exceeded`, `kv_capacity_exceeded`, `queue_full`, `slo_infeasible`, `duplicate_request`,
    `invalid_request`. `retry_after_s`: when it may be worth another try, where that can be told; infinite where it
    will not be, however little there is to do.
    """

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class WireError(ValueError):
    """Bytes that are no message of ours: malformed, of a foreign kind, or of another version."""
