"""What vLLM raises of a request that it refuses."""


class VLLMValidationError(Exception):
    pass
