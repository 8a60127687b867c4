"""The error that vLLM raises at a request that it refuses."""


class VLLMValidationError(Exception):
    pass
