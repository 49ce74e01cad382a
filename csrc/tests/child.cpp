#include "tests/child.h"

#include <sys/wait.h>
#include <unistd.h>

#include <exception>

namespace hscache::test {
namespace {

constexpr unsigned kHangs = 20;  // seconds after which a child is taken to hang

}  // namespace

std::string in_child(const std::function<std::string()>& body) {
  int channel[2];
  if (pipe(channel) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    alarm(kHangs);
    std::string answer;
    try {
      answer = body();
    } catch (const std::exception& error) {
      answer = std::string("threw: ") + error.what();
    }
    const bool written =
        write(channel[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size());
    _exit(written ? 0 : 1);
  }
  close(channel[1]);
  std::string answer(4096, '\0');
  const ssize_t got = read(channel[0], answer.data(), answer.size());
  close(channel[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || got < 0) return "died";
  answer.resize(static_cast<std::size_t>(got));
  return answer;
}

}  // namespace hscache::test
