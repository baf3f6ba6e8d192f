"""Every error a caller can meet, in one tree.

    OctavoError
    ├── ClientError             the request is at fault; carries param, value, code and the HTTP status
    │   ├── InvalidRequestError     400  a field is missing, wrong, out of range, unknown or unsupported
    │   ├── AuthenticationError     401
    │   ├── ModelNotFoundError      404  the request names a model this server does not have
    │   ├── RequestTooLargeError    413
    │   └── OverloadedError         429
    ├── ServerError             we are at fault, or not ready; the request may be tried again
    │   ├── RequestFailedError      500  one request failed inside the engine; others were not disturbed
    │   ├── RequestTimeoutError     504  the request took longer than --request-timeout and was aborted
    │   └── EngineDeadError         503  the engine process died; it is being started again
    ├── ConfigError             an option at start-up is wrong; carries the option's name
    ├── ModelLoadError          the model cannot be used
    │   ├── ModelSourceError        not found, or cannot be fetched from here
    │   ├── CorruptFileError        damaged or truncated; carries the path
    │   ├── IncompleteWeightsError  parameters missing or left over; names them
    │   └── UnsupportedModelError   readable, but not a model we can run
    └── ShapeError              our own mistake: arrays that do not fit together

A message says what was wrong, the value, the limit and the way out.
"""

from __future__ import annotations

from typing import Any


class OctavoError(Exception):
    """Base of all errors raised on purpose."""


class ClientError(OctavoError):
    """The request is at fault.

    param: the field, in the API's spelling ("max_tokens", "messages[2].content"), or None
    value: what was sent, or None when it must not be shown (keys)
    code:  a short machine-readable word ("context_length_exceeded", "unknown_field"); without one, default_code
    """

    status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, value: Any = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.value = value
        self.code = code or self.default_code


class InvalidRequestError(ClientError):
    pass


class AuthenticationError(ClientError):
    status = 401
    error_type = "authentication_error"
    default_code = "invalid_api_key"


class ModelNotFoundError(ClientError):
    status = 404
    error_type = "not_found_error"
    default_code = "model_not_found"


class RequestTooLargeError(ClientError):
    status = 413
    default_code = "request_too_large"


class OverloadedError(ClientError):
    status = 429
    error_type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class ServerError(OctavoError):
    status = 500
    error_type = "internal_server_error"

    def __init__(self, message: str, *, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = None
        self.code = code


class RequestFailedError(ServerError):
    pass


class RequestTimeoutError(ServerError):
    status = 504
    error_type = "timeout_error"


class EngineDeadError(ServerError):
    status = 503
    error_type = "service_unavailable_error"


class ConfigError(OctavoError):
    """option: the option at fault in its command-line spelling ("--block-size"), or None."""

    def __init__(self, message: str, *, option: str | None = None):
        super().__init__(message)
        self.message = message
        self.option = option


class ModelLoadError(OctavoError):
    pass


class ModelSourceError(ModelLoadError):
    pass


class CorruptFileError(ModelLoadError):
    pass


class IncompleteWeightsError(ModelLoadError):
    pass


class UnsupportedModelError(ModelLoadError):
    pass


class ShapeError(OctavoError):
    pass


# What a sequence ends with when its request left it no token: the one failure in the engine that is the client's fault.
# A failure crosses the process boundary as its sentence, so the server knows this one by it.
NO_ALLOWED_TOKEN = (
    "No token of allowed_token_ids can go on with the text that the grammar asks for; "
    "allow the tokens that it needs, or leave one of them out."
)
