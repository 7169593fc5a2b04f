// Tests the name table of the registry of communicators.
#include <gtest/gtest.h>

#include "ops/name_table.h"

namespace {

using collx::NameTable;

constexpr int kDevice = 3;

/// Like a communicator, it leaves the table in its destructor, after its weak pointers have
/// expired.
struct Member {
  NameTable<Member>* table;
  std::function<void()> before_leaving;
  ~Member() {
    if (before_leaving) before_leaving();
    table->leave("name", this);
  }
};

std::shared_ptr<Member> member(NameTable<Member>& table) {
  return std::make_shared<Member>(Member{&table, {}});
}

TEST(NameTable, a_name_is_free_again_when_its_object_has_left) {
  NameTable<Member> table;
  auto first = member(table), second = member(table);
  EXPECT_TRUE(table.enter("name", first, kDevice));
  EXPECT_FALSE(table.enter("name", second, kDevice));
  EXPECT_EQ(table.find("name"), first);
  EXPECT_EQ(table.names(), std::vector<std::string>{"name"});
  EXPECT_EQ(table.live(kDevice), 1);
  first.reset();
  EXPECT_EQ(table.live(kDevice), 0);
  EXPECT_EQ(table.find("name"), nullptr);
  EXPECT_TRUE(table.enter("name", second, -1));
  EXPECT_EQ(table.live(kDevice), 0);
}

TEST(NameTable, who_takes_the_name_of_a_dying_object_takes_its_place_on_the_device) {
  NameTable<Member> table;
  auto first = member(table), second = member(table);
  EXPECT_TRUE(table.enter("name", first, kDevice));
  first->before_leaving = [&] { EXPECT_TRUE(table.enter("name", second, kDevice)); };
  first.reset();
  EXPECT_EQ(table.find("name"), second);
  EXPECT_EQ(table.live(kDevice), 1);
  second.reset();
  EXPECT_EQ(table.live(kDevice), 0);
}

}  // namespace
