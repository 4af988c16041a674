"""What everything speaks in: errors, messages, events, words for people. Imports nothing else of nbtrain."""
