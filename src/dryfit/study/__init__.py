"""One study: next steps, their execution, plans, devices, and the doctor."""
