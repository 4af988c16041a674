"""What may be typed: `%distributed`, `%%distributed`, its line and verbs, and the picker. Makes a `RunSpec` of it."""
