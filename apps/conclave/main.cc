#include "run_tool.h"

int main(int argc, char** argv) { return conclave::tool::run_tool(argc, argv); }
