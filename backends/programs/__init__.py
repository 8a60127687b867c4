"""Programs: engines in any language, as children that answer lines of JSON.

`command:PROGRAM` opens one; `protocol.schema.json` beside this file is the protocol's schema.
"""
