"""The specification: every op in plain torch on the CPU, same arguments as the ops themselves."""
