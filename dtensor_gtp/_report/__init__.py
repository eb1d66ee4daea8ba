"""How a report is shown: facts as data, as text and as a page."""
