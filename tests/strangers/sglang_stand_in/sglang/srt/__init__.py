"""Where SGLang's settings lie."""
