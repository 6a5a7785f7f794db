"""Measurements of parts: `splitpoint bench`. Clients of the parts' own interfaces; nothing that serves imports them."""
