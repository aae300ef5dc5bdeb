// Processes of this machine, told apart from later ones of the same number.
#pragma once

#include <string>
#include <sys/types.h>

namespace conclave::tool {

// "4711 8312004": a process and the time of its start. Empty where it has ended.
std::string process_mark(const std::string& pid);
// Whether that process is there yet.
bool is_there(const std::string& mark);
// The machine and the space of numbers in which marks of this process mean something: containers
// may share a directory, and then know nothing of each other's processes.
std::string place_of_marks();

// "R", "S", "T" where a signal has stopped it, "Z" where it has ended; empty where it is not there.
std::string state_of(pid_t pid);

}  // namespace conclave::tool
