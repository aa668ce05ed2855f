//! Each rule of the proof is broken by one mutation of a proven schedule, and names what was mutated.
