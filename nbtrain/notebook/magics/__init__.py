"""What may be typed: `%distributed`, `%%distributed`, its line and verbs. Makes a `RunSpec` of it."""
